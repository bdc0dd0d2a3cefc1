"""Timers run on time, in order, and despite slow tasks and shortages."""

from __future__ import annotations

import logging
import time
from contextlib import closing

import pytest
from tests.support.executors import ExecutorHarness, link_pair, sequence, soon

from telegrad.transport.base import Ready
from telegrad.wire.frames import Kind


def test_timers_run_while_the_only_runner_waits_for_a_link(harness: ExecutorHarness) -> None:
    here, there = link_pair()
    waiting, answered, rang = harness.event(), harness.event(), harness.event()

    def call() -> None:
        waiting.set()
        while not harness.executor.wait_for_link(there, soon()) & Ready.READ:
            pass
        answered.set()

    with closing(here), closing(there):
        harness.executor.submit(call)
        assert waiting.wait(soon())
        harness.executor.timers.at(time.monotonic() + 0.01, rang.set)
        assert rang.wait(soon())
        here.send(Kind.HANDSHAKE, b"answer", 0, 0, 0)
        assert answered.wait(soon())


def test_timers_run_in_order_and_cancelled_ones_do_not_run(harness: ExecutorHarness) -> None:
    order: list[str] = []
    done = harness.event()
    now = time.monotonic() + 0.25  # late enough to set all of them first, even on a loaded machine
    harness.executor.timers.at(now + 0.04, done.set)
    for name, after in [("third", 0.03), ("first", 0.01), ("never", 0.015), ("second", 0.02), ("same", 0.02)]:
        timer = harness.executor.timers.at(now + after, lambda name=name: order.append(name))  # type: ignore[misc]  # mypy cannot type a default
        if name == "never":
            harness.executor.timers.cancel(timer)
            harness.executor.timers.cancel(timer)
    assert done.wait(soon())
    assert order == ["first", "second", "same", "third"]


def test_a_timer_does_not_run_early(harness: ExecutorHarness) -> None:
    rang, when = harness.event(), time.monotonic() + 0.03
    at: list[float] = []
    harness.executor.timers.at(when, sequence(lambda: at.append(time.monotonic()), rang.set))
    assert rang.wait(soon())
    assert at[0] >= when


def test_an_earlier_timer_does_not_wait_for_a_later_one(harness: ExecutorHarness) -> None:
    rang = harness.event()
    later = harness.executor.timers.at(time.monotonic() + 1000, lambda: None)
    harness.executor.timers.at(time.monotonic() + 0.01, rang.set)
    assert rang.wait(soon())
    harness.executor.timers.cancel(later)


def test_timers_run_while_a_task_is_slow(harness: ExecutorHarness) -> None:
    release, started, rang = harness.event(), harness.event(), harness.event()
    harness.executor.submit(sequence(started.set, lambda: release.wait(soon())))
    assert started.wait(soon())
    harness.executor.timers.at(time.monotonic(), rang.set)
    assert rang.wait(soon())
    release.set()


def test_a_failing_timer_is_logged_and_the_next_one_runs(
    harness: ExecutorHarness, caplog: pytest.LogCaptureFixture
) -> None:
    rang = harness.event()

    def fail() -> None:
        raise ValueError("a bug")

    with caplog.at_level(logging.ERROR, "telegrad"):
        harness.executor.timers.at(time.monotonic(), fail)
        harness.executor.timers.at(time.monotonic(), rang.set)
        assert rang.wait(soon())
    assert "a bug" in caplog.text


def test_cancelled_timers_are_removed_from_the_heap(harness: ExecutorHarness) -> None:
    far = time.monotonic() + 10_000
    for _ in range(1000):
        harness.executor.timers.cancel(harness.executor.timers.at(far, lambda: None))
    assert len(harness.executor.timers.heap) <= 130


def test_a_timer_that_ran_out_of_memory_is_retried(harness: ExecutorHarness, caplog: pytest.LogCaptureFixture) -> None:
    tries: list[int] = []
    done = harness.event()

    def need_memory() -> None:
        tries.append(1)
        if len(tries) < 3:
            raise MemoryError
        done.set()

    harness.executor.timers.at(harness.runtime.now(), need_memory)
    assert done.wait(soon())
    assert len(tries) == 3
