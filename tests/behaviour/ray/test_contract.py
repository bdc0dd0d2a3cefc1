"""`launch.ray.group` fulfills the contract of launchers, on a real cluster."""

from __future__ import annotations

from contextlib import closing
from functools import partial
from typing import Any

import pytest

from telegrad import launch
from telegrad.testing.launch_contract import CHECKS, Check, Harness, LauncherUnderTest, NotApplicable


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_contract(cluster: Any, check: Check) -> None:
    # Half a CPU: one check runs two groups at once.
    start = partial(launch.ray.group, resources={"CPU": 0.5})
    try:
        with closing(Harness(LauncherUnderTest(start, patience=240, restarts=True))) as harness:
            check(harness)
    except NotApplicable as reason:
        pytest.skip(str(reason))
