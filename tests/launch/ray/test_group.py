"""Arguments that are checked before Ray is imported. Groups on Ray are tested in tests/behaviour/ray."""

from __future__ import annotations

import os

import pytest

from telegrad.launch import ray


def test_output_without_names_is_refused() -> None:
    with pytest.raises(ValueError, match="Ray prints the output of all workers with their names"):
        ray.group(os.getpid, 2, prefix=False)
