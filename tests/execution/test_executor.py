"""The executor runs tasks and lets threads wait without blocking the agent."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import closing
from functools import partial

import pytest
from tests.support.executors import PATIENCE, ExecutorHarness, link_pair, sequence, simulate, soon

from telegrad.execution.executor import GuaranteedTask
from telegrad.testing.scheduler import Scheduler
from telegrad.transport.base import Ready
from telegrad.transport.sockets import SocketPoller
from telegrad.waiting import Event, RealRuntime
from telegrad.wire.frames import Kind


def test_tasks_start_in_the_order_of_submission(serial: ExecutorHarness) -> None:
    order: list[int] = []
    done = serial.event()

    def submit_all() -> None:
        for number in range(100):
            serial.executor.submit(partial(order.append, number))
        serial.executor.submit(done.set)

    serial.executor.submit(submit_all)  # none of the others starts before all are submitted
    assert done.wait(soon())
    assert order == list(range(100))


def test_tasks_submitted_together_wake_the_poller_once(
    harness: ExecutorHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    polls, wake, woken = harness.event(), harness.poller.wake, []
    harness.executor.submit(polls.set)
    assert polls.wait(soon())
    monkeypatch.setattr(harness.poller, "wake", lambda: (woken.append(1), wake()))
    events = [harness.event() for _ in range(50)]
    harness.executor.submit_all([event.set for event in events])
    assert all(event.wait(soon()) for event in events)
    assert len(woken) <= 1


def test_waiting_tasks_do_not_count_as_running(narrow: ExecutorHarness) -> None:
    release = narrow.event()
    waiting = [narrow.event() for _ in range(20)]
    ended = [narrow.event() for _ in range(20)]

    def wait(number: int) -> None:
        waiting[number].set()
        assert narrow.executor.wait(release, soon())
        ended[number].set()

    for number in range(20):
        narrow.executor.submit(lambda number=number: wait(number))  # type: ignore[misc]  # mypy cannot type a default
    assert all(event.wait(soon()) for event in waiting), "waiting tasks kept others from starting"
    release.set()
    assert all(event.wait(soon()) for event in ended)


def test_nested_waits_never_exhaust_the_threads(narrow: ExecutorHarness) -> None:
    depth = 500
    results = [narrow.event() for _ in range(depth)]

    def nest(level: int) -> None:
        if level + 1 < depth:
            narrow.executor.submit(lambda: nest(level + 1))
            assert narrow.executor.wait(results[level + 1], soon())
        results[level].set()

    narrow.executor.submit(lambda: nest(0))
    assert results[0].wait(soon())


def test_wait_ends_at_its_deadline(harness: ExecutorHarness) -> None:
    outcome: list[bool] = []
    done = harness.event()

    def task() -> None:
        outcome.append(harness.executor.wait(harness.event(), time.monotonic() + 0.02))
        outcome.append(harness.executor.wait(done_before, soon()))
        done.set()

    done_before = harness.event()
    done_before.set()
    harness.executor.submit(task)
    assert done.wait(soon())
    assert outcome == [False, True]
    assert not harness.executor.wait(harness.event(), time.monotonic() + 0.01), "also on other threads"


def test_no_task_is_lost_when_many_threads_submit(harness: ExecutorHarness) -> None:
    count, lock, done = 0, threading.Lock(), harness.event()

    def task() -> None:
        nonlocal count
        with lock:
            count += 1
            if count == 2000:
                done.set()

    def submit() -> None:
        for _ in range(500):
            harness.executor.submit(task)

    threads = [threading.Thread(target=submit) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert done.wait(soon())


def test_other_tasks_run_while_a_runner_waits_for_a_link(harness: ExecutorHarness) -> None:
    here, there = link_pair()
    waiting, answered, other = harness.event(), harness.event(), harness.event()
    outcome: list[int] = []

    def call() -> None:
        waiting.set()
        while True:
            ready = harness.executor.wait_for_link(there, soon())
            if ready & Ready.READ:
                break
        outcome.append(ready)
        answered.set()

    with closing(here), closing(there):
        harness.executor.submit(call)
        assert waiting.wait(soon())
        harness.executor.submit(other.set)
        assert other.wait(soon())
        here.send(Kind.HANDSHAKE, b"answer", 0, 0, 0)
        assert answered.wait(soon())
    assert [ready & Ready.READ for ready in outcome] == [Ready.READ]  # the poller may be ready, too


def test_wait_for_link_ends_at_its_deadline(harness: ExecutorHarness) -> None:
    here, there = link_pair()
    done, outcome = harness.event(), []

    def call() -> None:
        deadline = time.monotonic() + 0.02
        ready = Ready.NOTHING
        while time.monotonic() < deadline:
            ready = harness.executor.wait_for_link(there, deadline)
        outcome.append(ready)
        done.set()

    with closing(here), closing(there):
        harness.executor.submit(call)
        assert done.wait(soon())
        assert not harness.executor.wait_for_link(there, time.monotonic() + 0.01), "also on other threads"
    assert outcome == [Ready.NOTHING]


def test_nested_waits_for_links_never_exhaust_the_threads(narrow: ExecutorHarness) -> None:
    depth = 100
    pairs = [link_pair() for _ in range(depth)]
    done = narrow.event()

    def nest(level: int) -> None:
        if level + 1 < depth:
            narrow.executor.submit(lambda: nest(level + 1))
            while not narrow.executor.wait_for_link(pairs[level][1], soon()) & Ready.READ:
                pass
        if level:
            pairs[level - 1][0].send(Kind.HANDSHAKE, b"answer", 0, 0, 0)
        else:
            done.set()

    narrow.executor.submit(lambda: nest(0))
    ended = done.wait(soon())
    for here, there in pairs:
        here.close()
        there.close()
    assert ended


def test_stop_runs_guaranteed_tasks_and_drops_the_others() -> None:
    with closing(SocketPoller()) as poller:
        harness = ExecutorHarness(RealRuntime(), poller, max_running=1)
        harness.executor.start()
        busy, release, ran = harness.event(), harness.event(), harness.event()
        order: list[str] = []
        harness.executor.submit(sequence(busy.set, lambda: release.wait(soon())))
        assert busy.wait(soon())
        harness.executor.submit(lambda: order.append("a request"))
        harness.executor.submit(GuaranteedTask(sequence(lambda: order.append("guaranteed before"))))
        harness.executor.stop(time.monotonic() - 1)
        harness.executor.submit(lambda: order.append("a late request"))
        harness.executor.submit_all([GuaranteedTask(sequence(lambda: order.append("guaranteed during"), ran.set))])
        release.set()
        assert ran.wait(soon())
        assert harness.executor.stop(soon()) == []
        harness.executor.submit_all([GuaranteedTask(sequence(lambda: order.append("guaranteed after")))])
        assert harness.executor.stop(soon()) == []
        assert order == ["guaranteed before", "guaranteed during", "guaranteed after"]


def test_a_slow_guaranteed_task_does_not_block_the_next_one_during_stop() -> None:
    with closing(SocketPoller()) as poller:
        harness = ExecutorHarness(RealRuntime(), poller)
        harness.executor.start()
        second_ran, waited = threading.Event(), []
        with harness.executor._lock:  # no runner takes them before the executor is being stopped
            harness.executor.queue.ready.append(GuaranteedTask(lambda: waited.append(second_ran.wait(PATIENCE))))
            harness.executor.queue.ready.append(GuaranteedTask(second_ran.set))
        assert harness.executor.stop(soon()) == []
        assert waited == [True]


@pytest.mark.parametrize("seed", range(10))
def test_nested_waits_and_timers_end_in_every_order(seed: int) -> None:
    def program(harness: ExecutorHarness, scheduler: Scheduler) -> None:
        random = scheduler.random
        done: list[Event] = []

        def task(depth: int, end: Event) -> None:
            for _ in range(random.randrange(3) if depth else 0):
                inner = harness.event()
                start = harness.executor.submit if random.random() < 0.7 else delayed
                start(lambda inner=inner: task(depth - 1, inner))  # type: ignore[misc]  # mypy cannot type a default
                assert harness.executor.wait(inner, None)
            end.set()

        def delayed(action: Callable[[], None]) -> None:
            harness.executor.timers.at(scheduler.now + random.random(), lambda: harness.executor.submit(action))

        for _ in range(20):
            done.append(harness.event())
            harness.executor.submit(lambda end=done[-1]: task(4, end))  # type: ignore[misc]  # mypy cannot type a default
        for event in done:
            assert event.wait(scheduler.now + 1000)

    simulate(seed, program)


def test_nothing_runs_after_stop(harness: ExecutorHarness) -> None:
    assert harness.executor.stop(soon()) == []
    ran = harness.event()
    harness.executor.submit(ran.set)
    assert harness.executor.threads.count() == 0
    assert not ran.is_set()
