"""A group of three workers in one process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.support.trained_model import Group

from telegrad.default_agent import acting_as
from telegrad.testing.group import local_group


@pytest.fixture
def group() -> Iterator[Group]:
    """Workers a, b and c; the test acts as a."""
    with local_group(["a", "b", "c"]) as agents, acting_as(agents["a"]):
        yield agents


@pytest.fixture(params=[False, True], ids=["step", "in backward"])
def in_backward(request: pytest.FixtureRequest) -> bool:
    """Whether the optimizer steps inside the backward pass."""
    return bool(request.param)
