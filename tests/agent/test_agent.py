"""An agent as an object: its parts, with and without extensions."""

from __future__ import annotations

import pytest

from telegrad import autograd, rpc
from telegrad.agent.agent import Agent
from telegrad.default_agent import acting_as
from telegrad.errors import NotInitialized
from telegrad.settings import AgentSettings
from telegrad.transport.memory import MemoryNetwork, MemoryTransport
from telegrad.waiting import RealRuntime


@pytest.fixture
def bare() -> Agent:
    """An agent without autograd and references."""
    transport = MemoryTransport(MemoryNetwork())
    agent = Agent("a", 0, transports=[(transport, "memory://a")], poller=transport.poller(), runtime=RealRuntime())
    agent.start([agent.me])
    return agent


def test_an_agent_without_extensions_says_what_it_was_made_without(bare: Agent) -> None:
    with acting_as(bare):
        with pytest.raises(NotInitialized, match="worker 'a' was made without distributed autograd"):
            autograd.context().__enter__()
        with pytest.raises(NotInitialized, match="worker 'a' was made without references"):
            rpc.RRef(1)
    assert bare.call("a", abs, (-1,)) == 1
    bare.shutdown()


def test_settings_can_be_replaced_while_the_agent_runs(bare: Agent) -> None:
    bare.settings = AgentSettings(rpc_timeout=7.0)
    with acting_as(bare):
        assert rpc.get_rpc_timeout() == 7.0
    assert bare.local.settings.rpc_timeout == 7.0
    bare.close()
