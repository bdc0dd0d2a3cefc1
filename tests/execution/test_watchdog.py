"""The watchdog starts another runner when the busy ones are slow."""

from __future__ import annotations

import threading
import time
from contextlib import closing

import pytest
from tests.support.executors import PATIENCE, ExecutorHarness, ScarceRuntime, link_pair, sequence, soon

from telegrad.transport.base import Ready
from telegrad.wire.frames import Kind


def is_idle(harness: ExecutorHarness) -> bool:
    """Wait until the watchdog sleeps, and return whether it does."""
    deadline = soon()
    while harness.executor.queue.watchdog_wakeup is None and time.monotonic() < deadline:
        harness.event().wait(time.monotonic() + 0.005)
    return harness.executor.queue.watchdog_wakeup is not None


def test_a_slow_task_does_not_delay_other_tasks(harness: ExecutorHarness) -> None:
    release, others = harness.event(), [harness.event() for _ in range(5)]
    started = harness.event()

    def slow() -> None:
        started.set()
        release.wait(soon())  # not through the executor, so it looks like a slow computation

    harness.executor.submit(slow)
    assert started.wait(soon())
    for other in others:
        harness.executor.submit(other.set)
        assert other.wait(soon())
    release.set()


def test_tasks_submitted_together_all_run_even_if_one_is_slow(harness: ExecutorHarness) -> None:
    release, others = harness.event(), [harness.event() for _ in range(5)]
    harness.executor.submit_all([lambda: release.wait(soon()), *(other.set for other in others)])  # type: ignore[list-item]  # returns a bool
    for other in others:
        assert other.wait(soon())
    release.set()


def test_a_slow_task_does_not_stop_polling(harness: ExecutorHarness) -> None:
    release, started, found = harness.event(), harness.event(), harness.event()
    harness.on_ready = lambda item: found.set()
    harness.executor.submit(sequence(started.set, lambda: release.wait(soon())))
    assert started.wait(soon())
    here, there = link_pair()
    with closing(here), closing(there):
        harness.poller.add(there, read=True, once=True)
        here.send(Kind.HANDSHAKE, b"x", 0, 0, 0)
        assert found.wait(soon())
        release.set()


def test_slow_tasks_run_in_parallel_up_to_the_limit(narrow: ExecutorHarness) -> None:
    release = narrow.event()
    running: list[int] = []
    all_started, done = [narrow.event() for _ in range(4)], [narrow.event() for _ in range(4)]
    lock = threading.Lock()
    most = 0

    def slow(number: int) -> None:
        nonlocal most
        with lock:
            running.append(number)
            most = max(most, len(running))
        all_started[number].set()
        release.wait(soon())
        with lock:
            running.remove(number)
        done[number].set()

    for number in range(4):
        narrow.executor.submit(lambda number=number: slow(number))  # type: ignore[misc]  # mypy cannot type a default
    assert all_started[0].wait(soon())
    assert all_started[1].wait(soon())
    urgent = narrow.event()
    narrow.executor.submit(urgent.set, urgent=True)
    assert urgent.wait(soon()), "an urgent task waited for user functions"
    assert not all_started[2].is_set()
    release.set()
    assert all(event.wait(soon()) for event in done)
    assert most == 2


def test_a_task_submitted_by_a_slow_task_does_not_wait_for_it(harness: ExecutorHarness) -> None:
    ran, done = harness.event(), harness.event()
    outcome: list[bool] = []

    def slow() -> None:
        outcome.append(is_idle(harness))
        harness.executor.submit(ran.set)
        outcome.append(ran.wait(soon()))
        done.set()

    harness.executor.submit(slow)
    assert done.wait(soon())
    assert outcome == [True, True]


def test_a_task_that_is_slow_after_a_nested_call_does_not_delay_others(harness: ExecutorHarness) -> None:
    here, there = link_pair()
    ran, back, done = harness.event(), harness.event(), harness.event()
    outcome: list[bool] = []

    def slow() -> None:
        while not harness.executor.wait_for_link(there, soon()) & Ready.READ:
            pass
        back.set()
        outcome.append(ran.wait(soon()))
        done.set()

    with closing(here), closing(there):
        harness.executor.submit(slow)
        assert is_idle(harness)
        here.send(Kind.HANDSHAKE, b"x", 0, 0, 0)
        assert back.wait(soon())
        harness.executor.submit(ran.set)
        assert done.wait(soon())
    assert outcome == [True]


def test_watchdog_and_runners_survive_running_out_of_memory(
    scarce: tuple[ExecutorHarness, ScarceRuntime], caplog: pytest.LogCaptureFixture
) -> None:
    harness, runtime = scarce
    begun, go = harness.event(), harness.event()
    ran = [harness.event() for _ in range(4)]
    runtime.no_memory = True
    harness.executor.submit(sequence(begun.set, lambda: go.wait(soon())))  # wakes the watchdog, which needs an event
    assert begun.wait(soon())
    assert runtime.refused.wait(PATIENCE)
    runtime.no_memory = False
    for event in ran:
        harness.executor.submit(event.set)
    assert all(event.wait(soon()) for event in ran)  # the watchdog started another runner
    go.set()
