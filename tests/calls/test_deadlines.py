"""The deadlines of calls that no thread waits for: each passes in time, and calls that have ended are forgotten."""

from __future__ import annotations

import gc
import random
import threading
import time
import weakref

import pytest
import torch

from telegrad import rpc
from telegrad.agent.agent import Agent
from telegrad.calls.call import Call
from telegrad.calls.deadlines import Deadlines
from telegrad.default_agent import acting_as
from telegrad.errors import DeadlineExceeded
from telegrad.testing.group import local_group
from telegrad.testing.scheduler import SimRuntime
from telegrad.testing.simulation import Simulation
from telegrad.wire.messages import Reply

SEEDS = range(20)


class Ends:
    """Calls with deadlines, and when they were told that these passed."""

    def __init__(self, sim: Simulation) -> None:
        self.sim = sim
        self.expired: dict[int, float] = {}
        self.twice: list[int] = []
        self.raises: set[int] = set()
        self.deadlines = Deadlines(SimRuntime(sim.scheduler, "a"), sim["a"].executor, self._expire)
        self.calls: list[Call] = []

    def _expire(self, call: Call) -> None:
        if call.id in self.expired:
            self.twice.append(call.id)
        if call.id in self.raises:
            raise OSError("no file descriptor is left")
        if not call.done():
            self.expired[call.id] = self.sim.scheduler.now
            call.error = DeadlineExceeded("too late")

    def add(self, seconds: float) -> Call:
        now = self.sim.scheduler.now
        call = Call(len(self.calls), None, "b", "f", now, now + seconds)  # type: ignore[arg-type]  # no channel is asked
        self.calls.append(call)
        self.deadlines.add(call, now + seconds)
        return call


@pytest.mark.parametrize("seed", SEEDS)
def test_every_call_that_has_not_ended_expires_at_its_deadline_and_no_other(seed: int) -> None:
    """Deadlines in order and not, some of them of calls that end before, while time goes on."""
    chance = random.Random(seed)
    with Simulation(seed, ["a"]) as sim:
        ended: set[int] = set()

        def program() -> Ends:
            ends = Ends(sim)
            for _ in range(600):
                ends.add(chance.choice([5.0, 5.0, 5.0, 1.0, 7.0]))
                if chance.random() < 0.8:
                    call = chance.choice(ends.calls)
                    if not call.done():
                        call.answer = Reply(call.id)
                        ended.add(call.id)
                if chance.random() < 0.3:
                    sim.sleep(chance.random() / 20)
                elif chance.random() < 0.02:  # all of them end
                    for call in ends.calls:
                        if not call.done():
                            call.answer = Reply(call.id)
                            ended.add(call.id)
            sim.sleep(10.0)
            return ends

        ends = sim.run(program)
    assert not ends.twice
    assert ends.expired.keys() == {call.id for call in ends.calls} - ended
    for number, when in ends.expired.items():
        deadline = ends.calls[number].deadline
        assert deadline is not None
        assert deadline <= when < deadline + 0.001
    assert ends.deadlines.waiting() == 0


def test_one_call_that_lasts_does_not_keep_those_that_have_ended() -> None:
    with Simulation(0, ["a"]) as sim:

        def program() -> int:
            ends = Ends(sim)
            ends.add(60.0)
            for _ in range(20_000):
                ends.add(60.0).answer = Reply(0)
            return ends.deadlines.waiting()

        assert sim.run(program) < 600


def test_a_call_that_was_given_up_hides_nothing() -> None:
    with Simulation(0, ["a"]) as sim:

        def program() -> int:
            ends = Ends(sim)
            ends.add(60.0).error = RuntimeError("cancelled")
            for _ in range(10):
                ends.add(60.0).answer = Reply(0)
            return ends.deadlines.waiting()

        assert sim.run(program) == 1


def test_what_one_raises_does_not_keep_the_others_from_ending(caplog: pytest.LogCaptureFixture) -> None:
    with Simulation(0, ["a"]) as sim:

        def program() -> Ends:
            ends = Ends(sim)
            ends.raises.add(1)
            for _ in range(4):
                ends.add(1.0)
            sim.sleep(2.0)
            return ends

        assert list(sim.run(program).expired) == [0, 2, 3]
    assert "no file descriptor is left" in caplog.text


def nothing() -> None:
    """Calls this."""


made: list[weakref.ref[torch.Tensor]] = []


async def relay() -> torch.Tensor:
    await rpc.rpc_async("a", nothing)
    result = torch.zeros(1000)
    made.append(weakref.ref(result))
    return result


def test_what_a_coroutine_returned_does_not_live_as_long_as_the_deadline_of_a_call_that_it_made() -> None:
    made.clear()
    with local_group(["a", "b"]) as group, acting_as(group["a"]):
        for future in [rpc.rpc_async("b", relay) for _ in range(20)]:
            assert future.wait().shape == (1000,)
        del future
        deadline = time.monotonic() + 20
        while any(tensor() is not None for tensor in made):
            assert time.monotonic() < deadline, "they live on"
            gc.collect()
            threading.Event().wait(0.01)
    assert len(made) == 20


def test_a_call_expires_though_the_timer_of_one_that_has_ended_is_later() -> None:
    with Simulation(0, ["a"]) as sim:

        def program() -> dict[int, float]:
            ends = Ends(sim)
            ends.add(60.0).answer = Reply(0)
            ends.add(1.0)
            sim.sleep(2.0)
            assert list(ends.expired) == [1]
            ends.add(60.0).answer = Reply(2)
            ends.add(3.0)
            ends.add(5.0)
            sim.sleep(100.0)
            return ends.expired

        assert [round(when) for when in sim.run(program).values()] == [1, 5, 7]


def test_a_call_of_an_agent_expires_though_an_earlier_one_lasts_longer() -> None:
    with Simulation(0, ["a", "b"]) as sim:

        def program() -> list[float]:
            agent: Agent = sim["a"]
            sim["b"].register("sleep", sim.sleep)
            told: list[float] = []
            began = sim.scheduler.now
            for seconds in (40.0, 3.0, 20.0):
                agent.call_async(
                    "b", "@sleep", (100.0,), timeout=seconds, on_done=lambda _: told.append(sim.scheduler.now - began)
                )
            sim.sleep(50.0)
            return told

        assert [round(seconds) for seconds in sim.run(program)] == [3, 20, 40]
