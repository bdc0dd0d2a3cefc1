"""Runners that the system refuses to start are started later."""

from __future__ import annotations

import threading
from contextlib import closing

import pytest
from tests.support.executors import PATIENCE, ExecutorHarness, ScarceRuntime, sequence, soon

from telegrad.errors import ResourceExhausted
from telegrad.transport.sockets import SocketPoller


def test_runners_are_started_once_threads_are_available_again(
    scarce: tuple[ExecutorHarness, ScarceRuntime],
) -> None:
    harness, runtime = scarce
    go, meet = harness.event(), threading.Barrier(3)
    runtime.no_threads = True
    harness.executor.submit(lambda: go.wait(soon()))  # the only runner is busy
    ran = [harness.event() for _ in range(3)]
    for event in ran:
        harness.executor.submit(sequence(lambda: meet.wait(PATIENCE), event.set))
    assert runtime.refused.wait(PATIENCE)
    runtime.no_threads = False
    assert all(event.wait(soon()) for event in ran)  # needs three runners at once, besides the busy one
    go.set()


def test_a_waiting_task_is_woken_and_the_next_one_runs_after_a_shortage_of_threads(
    scarce: tuple[ExecutorHarness, ScarceRuntime],
) -> None:
    harness, runtime = scarce
    inner, outer = harness.event(), harness.event()
    runtime.no_threads = True
    harness.executor.submit(sequence(lambda: harness.executor.wait(inner, soon()), outer.set))
    assert runtime.refused.wait(PATIENCE)
    harness.executor.submit(inner.set)  # no runner is there to run it
    runtime.no_threads = False
    assert outer.wait(soon())


def test_start_raises_if_the_first_runner_cannot_be_started() -> None:
    with closing(SocketPoller()) as poller:
        runtime = ScarceRuntime()
        harness = ExecutorHarness(runtime, poller)
        runtime.no_threads = True
        with pytest.raises(ResourceExhausted, match="worker 'w' cannot start a thread: can't start new thread"):
            harness.executor.start()
        assert harness.executor.threads.count() == 0
        assert harness.executor.stop(soon()) == []
