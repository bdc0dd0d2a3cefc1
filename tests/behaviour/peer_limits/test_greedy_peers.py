"""A peer that keeps exceeding its limits is disconnected. The others notice nothing."""

from __future__ import annotations

import logging
import operator
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from telegrad.agent.agent import Agent
from telegrad.connection.channel import Channel
from telegrad.errors import LimitExceeded, TelegradError, WorkerLost
from telegrad.protocol.limits import SessionSettings
from telegrad.protocol.peer_limits import PeerLimits
from telegrad.settings import AgentSettings
from telegrad.testing.group import local_group
from telegrad.testing.simulation import Simulation

PATIENCE = 60.0


def channel_to(agent: Agent, name: str) -> Channel:
    channel = agent.peers.find(name).outgoing
    assert channel is not None
    return channel


def calls_until_lost(call: Callable[[], Any], most: int) -> tuple[int, WorkerLost]:
    """Call until the worker is lost, and return how many calls were refused before."""
    refused = 0
    for _ in range(most):
        try:
            call()
        except LimitExceeded:
            refused += 1
        except WorkerLost as error:
            return refused, error
    raise AssertionError(f"still connected after {most} calls")


@pytest.mark.parametrize("resumable", [False, True])
def test_a_peer_that_ignores_refusals_is_disconnected(resumable: bool, caplog: pytest.LogCaptureFixture) -> None:
    settings = AgentSettings(peer_limits={"greedy": PeerLimits(calls_per_second=1, burst=10)})
    names = ["victim", "greedy", "other"]

    def main() -> None:
        greedy, other = sim["greedy"], sim["other"]
        other.call("victim", operator.neg, (1,))
        refused, _ = calls_until_lost(lambda: greedy.call("victim", operator.neg, (1,)), 1000)
        assert 100 <= refused <= 110
        for number in range(200):
            assert other.call("victim", operator.neg, (number,)) == -number
        gone = sim["victim"].peers.find("greedy").gone
        assert "it kept exceeding its limits after many refused calls" in gone

    with (
        caplog.at_level(logging.WARNING, "telegrad"),
        Simulation(seed=1, workers=names, resumable=resumable, settings=settings) as sim,
    ):
        sim.run(main)
    lines = [record.message for record in caplog.records if record.message.startswith("worker 'victim'")]
    # About the first refused call, the end, and the attempt to reconnect, which tells the peer the reason.
    assert len(lines) == (3 if resumable else 2), lines


def test_a_peer_that_announces_far_too_much_is_disconnected_at_once() -> None:
    settings = AgentSettings(peer_limits=PeerLimits(message_size=1 << 20))

    def main() -> None:
        a, b = sim["a"], sim["b"]
        a.call("b", operator.neg, (1,))
        received = b.peers.find("a").incoming
        assert received is not None
        with pytest.raises(LimitExceeded, match="kept exceeding"):
            received.receiver._reserve(4 << 30)
        assert received.receiver._reserve(4 << 20) is not None

    with Simulation(seed=1, workers=["a", "b"], settings=settings) as sim:
        sim.run(main)


@pytest.mark.parametrize("transport", ["unix", "tcp"])
def test_a_peer_that_does_not_read_its_replies_is_disconnected(transport: str) -> None:
    limit = 1 << 20
    settings = AgentSettings(
        shared_memory=0,
        session=SessionSettings(request_credits=1_000_000),  # as a peer that ignores its credits
        peer_limits={"greedy": PeerLimits(bytes_held=limit)},
    )
    lost = threading.Event()
    with local_group(["victim", "greedy", "other"], transport=transport, settings=settings) as group:
        victim, greedy, other = group["victim"], group["greedy"], group["other"]
        victim.on_lost(lambda record, reason: lost.set())
        greedy.call("victim", operator.neg, (1,))
        channel = channel_to(greedy, "victim")
        channel.receiver.pump = lambda: None  # type: ignore[method-assign]  # it never reads again
        most = 0
        for number in range(100_000):
            try:
                greedy.begin("victim", bytes, (50_000,), timeout=PATIENCE)
            except TelegradError:
                break
            if number % 10 == 0:
                assert other.call("victim", operator.neg, (number,), timeout=PATIENCE) == -number
            served = victim.peers.find("greedy").incoming
            most = max(most, served.unread() if served is not None else 0)
            if lost.is_set():
                break
        assert lost.wait(PATIENCE)
        assert "it does not read its replies" in victim.peers.find("greedy").gone
        assert most < 2 * limit
        assert other.call("victim", operator.neg, (1,), timeout=PATIENCE) == -1


REGISTERED_LIKE = PeerLimits(
    calls_per_second=50,
    burst=100,
    calls=8,
    running=2,
    bytes_held=8 << 20,
    message_size=1 << 20,
    contexts=4,
    calls_per_context=16,
    references=8,
)


def greedy_programs(agent: Agent) -> list[Callable[[], Any]]:
    """Return ways to use up a worker."""

    def begin(*args: Any) -> None:
        agent.begin("victim", *args, timeout=0)

    return [
        lambda: begin(operator.neg, (1,)),
        lambda: begin(torch.sum, (torch.ones(2_000_000),)),
        lambda: begin(torch.sum, (torch.ones(200_000),)),
        lambda: begin(slow),
        lambda: agent.references.create("victim", torch.ones, (1000,), None, 0),
    ]


release = threading.Event()


def slow() -> None:
    release.wait(PATIENCE)


@pytest.mark.parametrize("transport", ["unix", "tcp"])
def test_others_are_served_while_a_peer_floods(transport: str) -> None:
    settings = AgentSettings(running=4, peer_limits={"greedy": REGISTERED_LIKE})
    release.clear()
    stop = threading.Event()
    held: list[Any] = []
    with local_group(["victim", "greedy", "other"], transport=transport, settings=settings) as group:
        victim, greedy, other = group["victim"], group["greedy"], group["other"]

        def flood() -> None:
            programs = greedy_programs(greedy)
            while not stop.is_set():
                for program in programs:
                    try:
                        held.append(program())
                    except TelegradError:
                        if greedy.peers.find("victim").gone:
                            return

        thread = threading.Thread(target=flood)
        thread.start()
        try:
            x = torch.ones(1000)
            for number in range(300):
                assert other.call("victim", torch.add, (x, number), timeout=PATIENCE)[0] == 1 + number
                calls, size = victim.local.accounts.usage().get("greedy", (0, 0))
                assert calls <= 8
                assert size <= 8 << 20
        finally:
            stop.set()
            release.set()
            thread.join(PATIENCE)
        assert not thread.is_alive()
        assert victim.references.counts()["values"] <= 8
        assert not victim.peers.find("other").gone
    held.clear()


def test_functions_of_one_peer_do_not_take_all_threads() -> None:
    settings = AgentSettings(running=2, peer_limits={"greedy": PeerLimits(running=1)})
    release.clear()
    with local_group(["victim", "greedy", "other"], settings=settings) as group:
        waiting = [group["greedy"].begin("victim", slow, timeout=0) for _ in range(5)]
        for number in range(20):
            assert group["other"].call("victim", operator.neg, (number,), timeout=PATIENCE) == -number
        assert not any(call.done() for call in waiting)
        release.set()
        for call in waiting:
            assert group["greedy"].wait(call)
            group["greedy"].result(call)
        assert group["victim"].local.accounts.usage()["greedy"] == (0, 0)
