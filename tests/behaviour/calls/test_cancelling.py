"""Calls that are given up while they wait, at the callee, for a thread."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from telegrad.agent.agent import Agent
from telegrad.calls.call import Call
from telegrad.errors import CallCancelled, DeadlineExceeded, TelegradError
from telegrad.protocol.limits import SessionSettings
from telegrad.settings import AgentSettings
from telegrad.testing.group import local_group
from telegrad.testing.simulation import Faults, Simulation


class Busy:
    """Worker b is at functions that compute, so that others wait; what runs after them is noted."""

    def __init__(self, seed: int, faults: Faults | None = None, *, credits: int = 1024) -> None:
        settings = AgentSettings(running=1, session=SessionSettings(request_credits=credits))
        self.sim = Simulation(seed, ["a", "b"], faults=faults, settings=settings)
        self.ran: list[str] = []

    def run(self, program: Callable[[Agent], Any]) -> None:
        """Run a program on a. Nobody can wait for what it calls before `finish`."""

        def main() -> None:
            b = self.sim["b"]
            b.register("note", self.ran.append)
            # A function that computes takes a place, and does not wait. In a simulation, where nothing takes time but
            # waiting, there is none; so its place is taken away instead.
            b.executor.queue.max_running = 0
            program(self.sim["a"])
            self.sim.sleep(5.0)
            assert b.server.active == {}

        self.sim.run(main)

    def finish(self) -> None:
        """What b was at is done."""
        b = self.sim["b"]
        b.executor.queue.max_running = 1
        b.executor.submit(lambda: None)


@pytest.mark.parametrize("seed", range(20))
def test_a_call_whose_deadline_passes_in_the_queue_never_runs(seed: int) -> None:
    busy = Busy(seed)

    def program(a: Agent) -> None:
        later = a.begin("b", "@note", ("wanted",), timeout=60.0)
        with pytest.raises(DeadlineExceeded):
            a.call("b", "@note", ("given up",), timeout=2.0)
        busy.sim.sleep(1.0)
        busy.finish()
        a.wait(later)

    busy.run(program)
    assert busy.ran == ["wanted"]


@pytest.mark.parametrize("seed", range(20))
def test_a_call_that_is_cancelled_in_the_queue_never_runs_also_where_connections_break(seed: int) -> None:
    busy = Busy(seed, Faults(cut=0.05, duplicate=0.05))

    def program(a: Agent) -> None:
        calls = [a.begin("b", "@note", (f"call {number}",), timeout=60.0) for number in range(6)]
        busy.sim.sleep(1.0)
        for call in calls[::2]:
            assert a.cancel(call)
            with pytest.raises(CallCancelled):
                a.result(call)
        busy.sim.sleep(5.0)
        busy.finish()
        for call in calls[1::2]:
            a.wait(call)
            a.result(call)

    busy.run(program)
    assert busy.ran == ["call 1", "call 3", "call 5"]


def test_credits_come_back_of_calls_that_were_given_up_in_the_queue() -> None:
    busy = Busy(0)

    def program(a: Agent) -> None:
        data = b"x" * 200_000
        for _ in range(5):
            with pytest.raises(DeadlineExceeded):
                a.call("b", "@note", (data,), timeout=0.5)
        channel = a.peers.find("b").outgoing
        assert channel is not None
        assert len(channel.abandoned) == 5
        busy.sim.sleep(1.0)
        busy.finish()
        a.call("b", "@note", ("wanted",))
        assert channel.abandoned == {}

    busy.run(program)
    assert busy.ran == ["wanted"]


def test_credits_come_back_of_a_call_that_is_given_up_just_when_its_answer_was_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with local_group(["a", "b"], settings=AgentSettings(session=SessionSettings(request_credits=1))) as group:
        a = group["a"]
        finish = a.client.completion.finish

        def give_up_first(call: Call, answer: Any = None, *args: Any, **kwargs: Any) -> bool:
            if answer is not None:
                assert a.cancel(call)
            return finish(call, answer, *args, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(a.client.completion, "finish", give_up_first)
            with pytest.raises(CallCancelled):
                a.call("b", abs, (-1,))
        assert a.call("b", abs, (-1,), timeout=20) == 1
        channel = a.peers.find("b").outgoing
        assert channel is not None
        assert channel.abandoned == {}


def test_credits_come_back_of_a_call_that_is_given_up_twice() -> None:
    busy = Busy(0, credits=1)

    def program(a: Agent) -> None:
        call = a.begin("b", "@note", ("unwanted",), timeout=60.0)
        busy.sim.sleep(1.0)
        assert a.cancel(call)
        assert not a.cancel(call)
        busy.sim.sleep(1.0)
        busy.finish()
        a.call("b", "@note", ("wanted",), timeout=20)

    busy.run(program)
    assert busy.ran == ["wanted"]


def test_what_was_to_be_made_by_a_call_that_was_given_up_in_the_queue_is_an_error() -> None:
    busy = Busy(0)

    def program(a: Agent) -> None:
        rref = a.references.create("b", "@note", ("made",), None, 2.0)
        busy.sim.sleep(3.0)
        busy.finish()
        with pytest.raises(TelegradError, match="has no value"):
            rref.to_here()
        del rref

    busy.run(program)
    assert busy.ran == []


def test_calls_in_the_queue_of_a_worker_that_was_lost_do_not_run() -> None:
    busy = Busy(0)

    def program(a: Agent) -> None:
        a.begin("b", "@note", ("orphan",), timeout=60.0)
        busy.sim.sleep(1.0)
        assert busy.sim["b"].server.active
        busy.sim.kill("a")
        busy.sim.sleep(60.0)
        busy.finish()

    busy.run(program)
    assert busy.ran == []


def test_a_cancellation_that_overtakes_a_large_request_counts_and_those_without_one_are_not_kept_for_ever() -> None:
    busy = Busy(0)

    def program(a: Agent) -> None:
        busy.finish()
        first = a.begin("b", "@note", ("first",))
        a.wait(first)
        b = busy.sim["b"]
        (channel,) = b.peers.find("a").channels()
        # As one in the lane of small messages does.
        assert b.server.cancel(channel, first.id + 1, "the caller gave it up") == []
        with pytest.raises(CallCancelled, match="the caller gave it up"):
            a.call("b", "@note", ("second",))
        for number in range(1000):
            b.server.cancel(channel, number, "too late")
        assert len(b.server._early) < 1000
        b.server.cancel_all(channel, "it is lost")
        assert not b.server._early

    busy.run(program)
    assert busy.ran == ["first"]
