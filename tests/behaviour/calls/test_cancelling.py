"""Calls that are cancelled, or time out, while they are queued at the callee."""

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
    """Worker b has no free place to run functions, so calls queue; `ran` lists those that ran later."""

    def __init__(self, seed: int, faults: Faults | None = None, *, credits: int = 1024) -> None:
        settings = AgentSettings(running=1, session=SessionSettings(request_credits=credits))
        self.sim = Simulation(seed, ["a", "b"], faults=faults, settings=settings)
        self.ran: list[str] = []

    def run(self, program: Callable[[Agent], Any]) -> None:
        """Run a program on worker a. Its calls stay queued until `finish`."""

        def main() -> None:
            b = self.sim["b"]
            b.register("note", self.ran.append)
            # A function that computes would hold the place. In a simulation only waiting takes time, and a function
            # that waits gives its place up, so the place is taken away instead.
            b.executor.queue.max_running = 0
            program(self.sim["a"])
            self.sim.sleep(5.0)
            assert b.server.active == {}

        self.sim.run(main)

    def finish(self) -> None:
        """Give worker b its place back."""
        b = self.sim["b"]
        b.executor.queue.max_running = 1
        b.executor.submit(lambda: None)


@pytest.mark.parametrize("seed", range(20))
def test_a_call_that_times_out_in_the_queue_never_runs(seed: int) -> None:
    busy = Busy(seed)

    def program(a: Agent) -> None:
        later = a.begin("b", "@note", ("wanted",), timeout=60.0)
        with pytest.raises(DeadlineExceeded):
            a.call("b", "@note", ("late",), timeout=2.0)
        busy.sim.sleep(1.0)
        busy.finish()
        a.wait(later)

    busy.run(program)
    assert busy.ran == ["wanted"]


@pytest.mark.parametrize("seed", range(20))
def test_a_call_cancelled_in_the_queue_never_runs_even_if_connections_break(seed: int) -> None:
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


def test_calls_that_time_out_in_the_queue_return_their_credits() -> None:
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


def test_a_call_cancelled_while_its_reply_is_being_delivered_returns_its_credit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with local_group(["a", "b"], settings=AgentSettings(session=SessionSettings(request_credits=1))) as group:
        a = group["a"]
        finish = a.client.completion.finish

        def cancel_first(call: Call, answer: Any = None, *args: Any, **kwargs: Any) -> bool:
            if answer is not None:
                assert a.cancel(call)
            return finish(call, answer, *args, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(a.client.completion, "finish", cancel_first)
            with pytest.raises(CallCancelled):
                a.call("b", abs, (-1,))
        assert a.call("b", abs, (-1,), timeout=20) == 1
        channel = a.peers.find("b").outgoing
        assert channel is not None
        assert channel.abandoned == {}


def test_a_call_cancelled_twice_returns_its_credit_once() -> None:
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


def test_the_value_of_an_rref_whose_creation_timed_out_in_the_queue_is_an_error() -> None:
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


def test_queued_calls_of_a_lost_caller_do_not_run() -> None:
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


def test_a_cancellation_may_overtake_its_request_and_stray_ones_are_forgotten() -> None:
    busy = Busy(0)

    def program(a: Agent) -> None:
        busy.finish()
        first = a.begin("b", "@note", ("first",))
        a.wait(first)
        server = busy.sim["b"].server
        (channel,) = busy.sim["b"].peers.find("a").channels()
        # A cancellation is small, so it can overtake a large request, which travels in the other lane.
        assert server.cancel(channel, first.id + 1, "the caller cancelled it") == []
        with pytest.raises(CallCancelled, match="the caller cancelled it"):
            a.call("b", "@note", ("second",))
        # Only the latest cancellations without a call are remembered.
        server.cancel(channel, first.id + 2, "forgotten")
        for number in range(1000):
            server.cancel(channel, first.id + 10 + number, "stray")
        a.call("b", "@note", ("third",))
        server.cancel(channel, first.id + 3, "forgotten with its channel")
        server.cancel_all(channel, "the caller is lost")
        a.call("b", "@note", ("fourth",))

    busy.run(program)
    assert busy.ran == ["first", "third", "fourth"]
