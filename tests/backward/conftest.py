"""A group of three workers in one process, checked after each test for contexts that were left behind."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.support.one_process import Group, nothing_left

from telegrad.default_agent import acting_as
from telegrad.testing.group import local_group


@pytest.fixture
def group() -> Iterator[Group]:
    """Start workers a, b and c. The test acts as a."""
    with local_group(["a", "b", "c"]) as agents:
        with acting_as(agents["a"]):
            yield agents
        nothing_left(agents)
