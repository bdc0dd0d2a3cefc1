"""A group in registered mode: a victim, a friend of it, and a hostile member."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.support import exposed, hostile
from tests.support.hostile import HostileMember

from telegrad.agent.agent import Agent
from telegrad.settings import AgentSettings
from telegrad.testing.group import local_group


@pytest.fixture
def group() -> Iterator[dict[str, Agent]]:
    """Yield the agents by name. Whatever the test did, no gadget may have fired, and the victim still serves."""
    hostile.fired.clear()
    settings = AgentSettings(accept="registered", rpc_timeout=30)
    with local_group(["victim", "friend", "mallory"], settings=settings) as agents:
        yield agents
        assert agents["friend"].call("victim", exposed.echo, ("alive",)) == "alive"
    assert hostile.fired == []


@pytest.fixture
def mallory(group: dict[str, Agent]) -> HostileMember:
    """Return the hostile member."""
    return HostileMember(group["mallory"])
