"""The threads of an executor are named, counted and joined."""

from __future__ import annotations

import threading
import time
from contextlib import closing

import pytest
import torch
from tests.support.executors import ExecutorHarness, sequence, soon

from telegrad.transport.sockets import SocketPoller
from telegrad.waiting import RealRuntime


def test_stop_returns_what_threads_execute_that_do_not_end() -> None:
    with closing(SocketPoller()) as poller:
        harness = ExecutorHarness(RealRuntime(), poller)
        harness.executor.start()
        release, started = harness.event(), harness.event()
        harness.executor.submit(sequence(started.set, lambda: release.wait(soon())))
        assert started.wait(soon())
        stuck = harness.executor.stop(time.monotonic() + 0.1)
        assert len(stuck) == 1
        assert stuck[0].startswith(
            "test_stop_returns_what_threads_execute_that_do_not_end.<locals>.<lambda> (test_threads"
        )
        release.set()
        assert harness.executor.stop(soon()) == []
        assert harness.executor.threads.count() == 0


def test_stop_ends_parked_and_polling_runners() -> None:
    with closing(SocketPoller()) as poller:
        harness = ExecutorHarness(RealRuntime(), poller)
        harness.executor.start()
        release, parked = harness.event(), harness.event()
        started = [harness.event() for _ in range(5)]
        for event in started:
            harness.executor.submit(sequence(event.set, lambda: harness.executor.wait(release, soon())))
        assert all(event.wait(soon()) for event in started)
        release.set()  # now all of them park, except the one that polls
        harness.executor.submit(parked.set)
        assert parked.wait(soon())
        assert harness.executor.threads.count() >= 2
        assert harness.executor.stop(soon()) == []
        assert harness.executor.threads.count() == 0


def test_a_runner_can_stop_its_own_executor() -> None:
    with closing(SocketPoller()) as poller:
        harness = ExecutorHarness(RealRuntime(), poller)
        harness.executor.start()
        outcome: list[list[str]] = []
        done = harness.event()
        harness.executor.submit(sequence(lambda: outcome.append(harness.executor.stop(soon())), done.set))
        assert done.wait(soon())
        assert outcome == [[]]
        assert harness.executor.stop(soon()) == []


def test_stop_joins_other_threads_and_their_errors_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    with closing(SocketPoller()) as poller:
        harness = ExecutorHarness(RealRuntime(), poller)
        harness.executor.start()
        names: list[str] = []

        def fail() -> None:
            names.append(threading.current_thread().name)
            raise ValueError("a bug")

        harness.executor.threads.start("island", fail)
        assert harness.executor.stop(soon()) == []
        assert names == ["telegrad:w:island"]
        assert "worker w: the island thread ended" in caplog.text


@pytest.mark.usefixtures("sim")
def test_the_current_device_of_all_threads_can_be_set() -> None:
    with closing(SocketPoller()) as poller:
        harness = ExecutorHarness(RealRuntime(), poller)
        harness.executor.threads.device_index = 1
        harness.executor.start()
        found: list[int] = []
        done = harness.event()
        harness.executor.submit(sequence(lambda: found.append(torch.accelerator.current_device_index()), done.set))
        assert done.wait(soon())
        assert found == [1]
        assert torch.accelerator.current_device_index() == 0
        assert harness.executor.stop(soon()) == []
