"""Messages of a peer with limits: what can be refused is refused, and what cannot disconnects the peer."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest

from telegrad.connection.channel import Channel
from telegrad.default_agent import default_agent
from telegrad.errors import LimitExceeded, WorkerLost
from telegrad.protocol.peer_limits import PeerLimits
from telegrad.settings import AgentSettings
from telegrad.testing.simulation import Simulation
from telegrad.wire.messages import (
    CleanupAutogradContextReq,
    Request,
    RRefBackwardReq,
    RRefSkip,
    RRefUserDelete,
    StreamPosition,
    encode_head,
)
from telegrad.wire.packing import pack


def run(program: Callable[[Simulation, Channel], None], **limits: float) -> Simulation:
    """Run a program with the channel on which worker a calls worker b, for which b has limits."""
    settings = AgentSettings(peer_limits={"a": PeerLimits(**limits)})
    with Simulation(seed=1, workers=["a", "b", "c"], resumable=False, settings=settings) as sim:

        def main() -> None:
            assert sim["a"].call("b", operator.neg, (1,)) == -1
            channel = sim["a"].peers.find("b").outgoing
            assert channel is not None
            program(sim, channel)
            assert sim["c"].call("b", operator.neg, (1,)) == -1

        sim.run(main)
    return sim


def post(channel: Channel, head: Any, data: bytes = b"") -> None:
    """Send a message with any head, as a hostile worker can."""
    channel.post(pack(encode_head(head), data, None, channel.room))


def test_requests_that_claim_to_be_nested_are_limited_too() -> None:
    def program(sim: Simulation, channel: Channel) -> None:
        for call in range(2000):
            post(channel, Request(10_000 + call, f"{__name__}:wait_long", 0.0, True), b"\x80\x05)}\x86.")
        sim.sleep(0.5)
        assert sim["b"].local.accounts.usage()["a"][0] <= 2
        assert sim["b"].peers.find("a").gone

    run(program, calls=2)


def test_a_call_number_that_is_used_twice_does_not_free_what_the_first_call_uses() -> None:
    def program(sim: Simulation, channel: Channel) -> None:
        head = Request(77, f"{__name__}:wait_long", 0.0, True)
        for _ in range(5):
            post(channel, head, b"\x80\x05)}\x86.")
        sim.sleep(0.5)
        assert sim["b"].local.accounts.usage()["a"][0] == 1
        sim.sleep(100.0)
        assert sim["b"].local.accounts.usage()["a"] == (0, 0)

    run(program, calls=1)


def wait_long() -> None:
    agent = default_agent()
    agent.executor.wait(agent.runtime.event(), agent.runtime.now() + 50.0)


def test_a_one_way_message_that_cannot_be_refused_disconnects_its_sender() -> None:
    def program(sim: Simulation, channel: Channel) -> None:
        post(channel, RRefUserDelete((0, 1, 2), (0, 3)), bytes(5000))
        sim.sleep(0.5)
        assert "5,0" in sim["b"].peers.find("a").gone
        with pytest.raises(WorkerLost):
            sim["a"].call("b", operator.neg, (1,))

    run(program, message_size=4000)


def test_backward_from_a_reference_is_a_call() -> None:
    def program(sim: Simulation, channel: Channel) -> None:
        a = sim["a"]
        call = a.client.ask("b", "backward", lambda number: RRefBackwardReq(number, (0, 1, 2), -1, False), 5.0)
        assert a.wait(call)
        with pytest.raises(LimitExceeded, match="calls per second"):
            a.result(call)

    run(program, calls_per_second=0.001, burst=1)


def test_ends_of_unknown_contexts_do_not_make_contexts_without_end() -> None:
    def program(sim: Simulation, channel: Channel) -> None:
        for number in range(50):
            post(channel, CleanupAutogradContextReq(2 << 48 | number, 7))
        sim.sleep(0.5)
        contexts = sim["b"].autograd.contexts
        assert len(contexts.all()) == contexts.opened_by(0) == 3
        assert not sim["b"].peers.find("a").gone

    run(program, contexts=3)


def test_values_that_are_only_announced_count_as_references() -> None:
    def program(sim: Simulation, channel: Channel) -> None:
        manager = sim["b"].references
        creator = sim["a"].references.context.incarnation << 40
        for number in range(50):
            rref = (0, creator | number + 100, manager.context.incarnation)
            post(channel, RRefSkip(StreamPosition(rref, 1, 0)))
            post(channel, RRefUserDelete(rref, (0, number)))
        sim.sleep(0.5)
        assert len(manager.context.values) <= 3
        assert manager.context.rules.early_deletions(0) <= 3
        assert not sim["b"].peers.find("a").gone

    run(program, references=3)
