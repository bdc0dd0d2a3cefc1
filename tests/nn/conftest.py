"""A group of three workers in one process; the test acts as a."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from telegrad.agent.agent import Agent
from telegrad.default_agent import acting_as
from telegrad.testing.group import local_group


@pytest.fixture
def group() -> Iterator[dict[str, Agent]]:
    with local_group(["a", "b", "c"]) as agents, acting_as(agents["a"]):
        yield agents
