"""A runner runs tasks, polls, parks, and survives errors."""

from __future__ import annotations

import errno
import logging
import socket
import threading
import time
from contextlib import closing

import pytest
from tests.support.executors import ExecutorHarness, sequence, simulate, soon

from telegrad.execution.runner_loop import IDLE_TIMEOUT
from telegrad.testing.scheduler import Scheduler
from telegrad.transport.socket_link import SocketLink


def test_a_task_runs_on_a_runner_thread(harness: ExecutorHarness) -> None:
    ran, names = harness.event(), []
    harness.executor.submit(sequence(lambda: names.append(threading.current_thread().name), ran.set))
    assert ran.wait(soon())
    assert names == ["telegrad:w:runner"]


def test_a_failing_task_is_logged_and_the_next_one_runs(
    harness: ExecutorHarness, caplog: pytest.LogCaptureFixture
) -> None:
    ran = harness.event()

    def fail() -> None:
        raise ValueError("a bug")

    with caplog.at_level(logging.ERROR, "telegrad"):
        harness.executor.submit(fail)
        harness.executor.submit(ran.set)
        assert ran.wait(soon())
        deadline = soon()
        while "a bug" not in caplog.text and time.monotonic() < deadline:  # another runner may have run the second task
            harness.event().wait(time.monotonic() + 0.005)
    assert "worker w: a task failed" in caplog.text
    assert "a bug" in caplog.text


def test_idle_runners_end() -> None:
    def program(harness: ExecutorHarness, scheduler: Scheduler) -> None:
        release, started = harness.event(), [harness.event() for _ in range(10)]
        for event in started:
            harness.executor.submit(sequence(event.set, lambda: harness.executor.wait(release, None)))
        for event in started:
            assert event.wait(scheduler.now + 60)
        assert harness.executor.threads.count() == 11
        release.set()
        harness.event().wait(scheduler.now + IDLE_TIMEOUT / 2)
        assert harness.executor.threads.count() == 11
        harness.event().wait(scheduler.now + IDLE_TIMEOUT)
        assert harness.executor.threads.count() == 1
        again = harness.event()
        harness.executor.submit(again.set)
        assert again.wait(scheduler.now + 60)

    simulate(1, program)


def test_polling_continues_after_an_exception(harness: ExecutorHarness, caplog: pytest.LogCaptureFixture) -> None:
    failed, seen = harness.event(), harness.event()

    def fail_once(item: object) -> None:
        if not failed.is_set():
            failed.set()
            raise OSError(errno.ENOMEM, "Cannot allocate memory")
        seen.set()

    harness.on_ready = fail_once
    ours, theirs = socket.socketpair()
    with theirs, closing(SocketLink(ours, peer="p", resumable=False)) as link:
        harness.poller.add(link, read=True)
        theirs.send(b"x")
        assert seen.wait(soon())
        harness.poller.remove(link)
    assert "polling failed and continues" in caplog.text
