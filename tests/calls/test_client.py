"""Threads that wait for calls on one channel: one of them reads, whoever comes and goes."""

from __future__ import annotations

import operator

import pytest

from telegrad.default_agent import acting_as
from telegrad.errors import DeadlineExceeded
from telegrad.futures import Future
from telegrad.rpc.api import current_call, rpc_async, rpc_sync
from telegrad.testing import Faults, Simulation
from telegrad.testing.group import local_group

SEEDS = range(40)


def after(seconds: float, value: int) -> int:
    """Answer later, in virtual time."""
    served = current_call()
    assert served is not None
    runtime = served.agent.runtime
    served.agent.executor.wait(runtime.event(), runtime.now() + seconds)
    return value


@pytest.mark.parametrize("seed", SEEDS)
def test_a_thread_that_gives_up_waiting_does_not_take_the_reading_with_it(seed: int) -> None:
    """Nothing but the threads reads this channel: if the one that should lead has gone, the others wait for ever."""
    ended: list[int] = []

    with Simulation(seed, ["a", "b"], faults=Faults(), resumable=False) as sim:

        def wait_briefly(seconds: float) -> None:
            future: Future[int] = rpc_async("b", after, (5.0, 0), timeout=30)
            with pytest.raises(DeadlineExceeded):
                future.wait(seconds)
            future.cancel()

        def call(seconds: float, value: int) -> None:
            assert rpc_sync("b", after, (seconds, value), timeout=30) == value
            ended.append(value)

        def program() -> float:
            threads = [sim.spawn("a", lambda: call(1.0, 1))]
            for number in range(3):
                threads.append(sim.spawn("a", lambda n=number: wait_briefly(1.0 + 0.002 * n)))
                threads.append(sim.spawn("a", lambda n=number: call(1.0 + 0.003 * n, 10 + n)))
            threads.append(sim.spawn("a", lambda: call(2.0, 2)))
            for thread in threads:
                assert thread.join(None)
            return sim.scheduler.now

        assert sim.run(program) < 3.0
    assert sorted(ended) == [1, 2, 10, 11, 12]


@pytest.mark.parametrize("seed", SEEDS)
def test_all_threads_that_wait_for_one_call_are_told_of_its_end(seed: int) -> None:
    told: list[int] = []

    with Simulation(seed, ["a", "b"], resumable=bool(seed % 2)) as sim:

        def program() -> float:
            futures: list[Future[int]] = []

            def begin() -> None:
                futures.append(rpc_async("b", after, (1.0, 7), timeout=30))

            assert sim.spawn("a", begin).join(None)
            threads = [sim.spawn("a", lambda: told.append(futures[0].wait())) for _ in range(4)]
            for thread in threads:
                assert thread.join(None)
            return sim.scheduler.now

        assert sim.run(program) < 2.0
    assert told == [7] * 4


def test_the_reply_to_a_call_that_was_interrupted_when_it_came_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """The call itself is, until it is recorded: when a thread waits for another worker."""
    with local_group() as group:
        client, events = group["a"].client, group["a"].local.events
        wait = client.wait

        def interrupted(*args: object) -> bool:
            wait(*args)  # type: ignore[arg-type]  # as `complete` calls it
            raise KeyboardInterrupt

        monkeypatch.setattr(client, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            group["a"].call("b", operator.add, (1, 2))
        ((call, _, size),) = events.unrecorded
        assert size > 0
        assert call.message is None


def test_calls_for_whose_events_there_is_no_memory_end_as_others_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(entry: object) -> None:
        raise MemoryError

    with local_group() as group, acting_as(group["a"]):
        for agent in group.values():
            monkeypatch.setattr(agent.local.events, "append", no_memory)
        for number in range(3):
            assert rpc_sync("b", operator.add, (number, 1)) == number + 1
        future: Future[int] = rpc_async("b", operator.add, (1, 2))
        assert future.then(lambda done: done.wait() + 1).wait() == 4
        with pytest.raises(ZeroDivisionError):
            rpc_sync("b", operator.truediv, (1, 0))
