"""A running executor with a poller, for tests."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

from telegrad.execution.executor import Executor
from telegrad.testing.scheduler import Scheduler, SimRuntime
from telegrad.transport.base import Poller
from telegrad.transport.memory import MemoryNetwork, MemoryTransport
from telegrad.transport.socket_link import SocketLink
from telegrad.transport.sockets import SocketPoller
from telegrad.waiting import Event, RealRuntime, Runtime, Thread

PATIENCE = 20.0


def soon() -> float:
    """A deadline that only a failing test reaches."""
    return time.monotonic() + PATIENCE


def sequence(*actions: Callable[[], object]) -> Callable[[], None]:
    """Return a task that performs `actions` one after the other."""

    def task() -> None:
        for action in actions:
            action()

    return task


class ObservedPoller:
    """The poller of a harness. What is ready goes to the harness instead of the executor."""

    def __init__(self, harness: ExecutorHarness) -> None:
        self._harness = harness

    def __getattr__(self, name: str) -> Any:
        return getattr(self._harness.poller, name)

    def wait(self, until: float | None) -> list[object]:
        """Wait for what is ready, and pass it to the harness."""
        for item, _ in self._harness.poller.wait(until):
            self._harness.on_ready(item)
        return []


class ExecutorHarness:
    """An executor that polls as an agent does. What is ready is passed to `on_ready`."""

    def __init__(self, runtime: Runtime, poller: Poller, *, max_running: int = 16) -> None:
        self.runtime = runtime
        self.poller = poller
        self.polled: list[object] = []
        self.on_ready: Callable[[object], None] = self.polled.append
        observed: Any = ObservedPoller(self)
        self.executor = Executor(runtime, observed, name="w", max_running=max_running)

    def event(self) -> Event:
        """Return a new event."""
        return self.runtime.event()


def running(runtime: Runtime | None = None, max_running: int = 16) -> Iterator[ExecutorHarness]:
    """Start an executor, yield its harness, and check that it stops."""
    with closing(SocketPoller()) as poller:
        harness = ExecutorHarness(runtime or RealRuntime(), poller, max_running=max_running)
        harness.executor.start()
        yield harness
        if isinstance(runtime, ScarceRuntime):
            runtime.no_threads = runtime.no_memory = False
        assert harness.executor.stop(soon()) == []


class ScarceRuntime(RealRuntime):
    """Refuses threads while `no_threads` is set, and events while `no_memory` is."""

    def __init__(self) -> None:
        self.no_threads = self.no_memory = False
        self.refused = threading.Event()

    def start_thread(self, name: str, target: Callable[[], None]) -> Thread:
        if self.no_threads:
            self.refused.set()
            raise RuntimeError("can't start new thread")
        return super().start_thread(name, target)

    def event(self) -> Event:
        if self.no_memory:
            self.refused.set()
            raise MemoryError
        return super().event()


def link_pair() -> tuple[SocketLink, SocketLink]:
    """Return the two ends of a connection."""
    here, there = socket.socketpair()
    return SocketLink(here, peer="there", resumable=False), SocketLink(there, peer="here", resumable=False)


def simulate(seed: int, program: Callable[[ExecutorHarness, Scheduler], None], *, max_running: int = 2) -> None:
    """Run `program` with an executor in virtual time."""
    scheduler = Scheduler(seed)
    runtime = SimRuntime(scheduler, "w")
    transport = MemoryTransport(MemoryNetwork(runtime))
    harness = ExecutorHarness(runtime, transport.poller(), max_running=max_running)

    def main() -> None:
        harness.executor.start()
        program(harness, scheduler)
        assert harness.executor.stop(scheduler.now + 1) == []

    scheduler.run(main)
    assert scheduler.errors == []
