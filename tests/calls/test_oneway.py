"""One-way messages: what comes back is read by the thread that waits for it, by another, or by a runner."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from telegrad.agent.agent import Agent
from telegrad.calls.link_reader import Waiter
from telegrad.connection.channel import Channel
from telegrad.connection.group_keys import derive_keys
from telegrad.errors import ProtocolError
from telegrad.testing.simulation import Simulation
from telegrad.wire.messages import CleanupAutogradContextReq, PropagateGradientsResp, ResumeReq

SEEDS = range(12)
LONG = 100.0
NOTICE = CleanupAutogradContextReq(1, 2)


def echo(agent: Agent) -> None:
    """Have it send an answer back to where a notice came from."""

    def back(channel: Channel, head: Any, message: Any) -> None:
        agent.oneway.tell(0, PropagateGradientsResp(head.context, 0, head.calls), back=channel)

    agent.handle(CleanupAutogradContextReq, back)


class Pair:
    """Workers a and b; b answers notices of a, on the connection that brought them."""

    def __init__(self, seed: int, *, resumable: bool) -> None:
        self.sim = Simulation(seed, ["a", "b"], resumable=resumable)
        self.came: list[tuple[int, int]] = []
        self.wakeups: dict[int, Waiter] = {}

    def run(self, program: Callable[[], Any]) -> Any:
        def main() -> Any:
            echo(self.sim["b"])
            self.sim["a"].handle(PropagateGradientsResp, self._answered, returns=True)
            return program()

        with self.sim:
            return self.sim.run(main)

    def _answered(self, channel: Channel, answer: PropagateGradientsResp, message: Any) -> None:
        self.came.append((answer.call, threading.get_ident()))
        self.wakeups[answer.call].set()

    def ask(self, number: int) -> Channel:
        self.wakeups[number] = Waiter()
        return self.sim["a"].oneway.send(1, CleanupAutogradContextReq(1, number))

    def wait(self, number: int, channel: Channel | None, seconds: float = LONG) -> bool:
        return self.sim["a"].oneway.wait(self.wakeups[number], channel, self.sim.scheduler.now + seconds)


@pytest.fixture(params=[True, False], ids=["resumable", "one host"])
def resumable(request: pytest.FixtureRequest) -> bool:
    value: bool = request.param
    return value


@pytest.mark.parametrize("seed", SEEDS)
def test_what_comes_back_is_handled_by_the_thread_that_waits_for_it(seed: int, resumable: bool) -> None:
    pair = Pair(seed, resumable=resumable)

    def program() -> int:
        channel = pair.ask(1)
        assert pair.wait(1, channel)
        return threading.get_ident()

    me = pair.run(program)
    if not resumable:  # else the poller may read it before this thread begins to wait
        assert pair.came == [(1, me)]


@pytest.mark.parametrize("seed", SEEDS)
def test_threads_that_wait_for_different_answers_all_get_theirs(seed: int, resumable: bool) -> None:
    pair = Pair(seed, resumable=resumable)

    def program() -> None:
        pair.wait(0, pair.ask(0))
        threads = [
            pair.sim.spawn("a", lambda number=number: in_time.append(pair.wait(number, pair.ask(number))))
            for number in range(1, 7)
        ]
        calls = [
            pair.sim.spawn("a", lambda: in_time.append(pair.sim["a"].call("b", max, (1, 2)) == 2)) for _ in range(3)
        ]
        for thread in [*threads, *calls]:
            assert thread.join(pair.sim.scheduler.now + LONG), pair.sim.scheduler.stacks()

    in_time: list[bool] = []
    pair.run(program)
    assert in_time == [True] * 9


@pytest.mark.parametrize("seed", SEEDS)
def test_a_thread_that_reads_is_woken_by_another(seed: int, resumable: bool) -> None:
    pair = Pair(seed, resumable=resumable)

    def program() -> bool:
        channel = pair.ask(1)
        pair.wait(1, channel)
        pair.wakeups[2] = Waiter()
        waiting = pair.sim.spawn("a", lambda: woken.append(pair.wait(2, channel)))
        pair.sim.sleep(1)
        pair.wakeups[2].set()
        return waiting.join(pair.sim.scheduler.now + 1)

    woken: list[bool] = []
    assert pair.run(program)
    assert woken == [True]


@pytest.mark.parametrize("seed", SEEDS)
def test_a_follower_that_gives_up_does_not_keep_the_next_from_reading(seed: int) -> None:
    pair = Pair(seed, resumable=False)

    def program() -> None:
        channel = pair.ask(0)
        pair.wait(0, channel)
        for number in (1, 2, 3):
            pair.wakeups[number] = Waiter()
        leader = pair.sim.spawn("a", lambda: pair.wait(1, channel))
        pair.sim.sleep(0.1)
        hasty = pair.sim.spawn("a", lambda: pair.wait(2, channel, 0.5))
        patient = pair.sim.spawn("a", lambda: in_time.append(pair.wait(3, channel)))
        pair.sim.sleep(1)
        assert hasty.join(pair.sim.scheduler.now)
        pair.wakeups[1].set()
        assert leader.join(pair.sim.scheduler.now + 1)
        pair.sim["a"].oneway.send(1, CleanupAutogradContextReq(1, 3))
        assert patient.join(pair.sim.scheduler.now + 10), pair.sim.scheduler.stacks()

    in_time: list[bool] = []
    pair.run(program)
    assert in_time == [True]


def test_a_wait_ends_at_its_deadline(resumable: bool) -> None:
    pair = Pair(1, resumable=resumable)

    def program() -> tuple[bool, float]:
        channel = pair.ask(1)
        pair.wait(1, channel)
        pair.wakeups[2] = Waiter()
        begin = pair.sim.scheduler.now
        return pair.wait(2, channel, 3.0), pair.sim.scheduler.now - begin

    in_time, took = pair.run(program)
    assert not in_time
    assert 3.0 <= took < 3.1


@pytest.mark.parametrize("left", [True, False])
def test_what_nobody_waits_for_is_read_by_a_runner_if_it_is_left_to_it(left: bool) -> None:
    pair = Pair(1, resumable=False)

    def program() -> int:
        channel = pair.ask(1)
        if left:
            channel.readers.leave_to_poller()
        pair.sim.sleep(1)
        return len(pair.came)

    assert pair.run(program) == (1 if left else 0)


def test_a_message_that_does_not_return_is_refused_where_this_worker_calls(caplog: pytest.LogCaptureFixture) -> None:
    sim = Simulation(1, ["a", "b"], resumable=False)

    def main() -> str:
        echo(sim["b"])
        sim["a"].oneway.handle(PropagateGradientsResp, lambda *_: None)
        sim["a"].oneway.handle(ResumeReq, lambda *_: None)
        channel = sim["a"].oneway.send(1, NOTICE)
        wakeup = Waiter()
        sim["a"].on_lost(lambda record, reason: wakeup.set())
        assert sim["a"].oneway.wait(wakeup, channel, LONG)
        return str(channel.session.lost_reason)

    with sim:
        assert "in the wrong direction" in sim.run(main)
    assert "wrong direction" in caplog.text


def test_a_handler_that_fails_is_reported_and_the_rest_is_handled(caplog: pytest.LogCaptureFixture) -> None:
    pair = Pair(1, resumable=False)

    def program() -> bool:
        def fail(channel: Channel, head: Any, message: Any) -> None:
            pair.sim["a"].handle(PropagateGradientsResp, pair._answered, returns=True)
            raise ProtocolError("no")

        pair.sim["a"].handle(PropagateGradientsResp, fail, returns=True)
        pair.ask(1)
        channel = pair.ask(2)
        return pair.wait(2, channel)

    assert pair.run(program)
    assert "a message handler failed" in caplog.text


@pytest.mark.parametrize("seconds", [0.5, 5.0, 20.0])
def test_a_message_arrives_although_a_stranger_was_at_the_address_for_a_while(seconds: float) -> None:
    with Simulation(seed=1, workers=["a", "b"]) as sim:
        arrived: list[float] = []

        def program() -> None:
            agent = sim["b"]
            agent.handle(CleanupAutogradContextReq, lambda *_: arrived.append(sim.scheduler.now))
            keys, agent.local.keys = agent.local.keys, derive_keys(b"another token")  # as a stranger, who knows no key
            sim["a"].tell(1, NOTICE)
            sim.sleep(seconds)
            assert arrived == []
            agent.local.keys = keys
            sim.sleep(5.0)

        sim.run(program)
        assert len(arrived) == 1


def test_a_worker_that_never_proves_itself_is_lost_if_it_has_to_be_told_something() -> None:
    with Simulation(seed=1, workers=["a", "b"]) as sim:
        lost: list[str] = []

        def program() -> None:
            sim["a"].on_lost(lambda record, reason: lost.append(f"{record.name}: {reason}"))
            sim["b"].local.keys = derive_keys(b"another token")
            sim["a"].tell(1, NOTICE)
            sim.sleep(20.0)
            assert lost == []
            sim.sleep(20.0)
            assert len(lost) == 1
            assert lost[0].startswith("b: worker 'b' did not prove that it belongs to this group")

        sim.run(program)
