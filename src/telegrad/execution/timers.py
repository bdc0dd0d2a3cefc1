"""Timers of one executor. The runner that polls runs those that are due."""

from __future__ import annotations

import heapq
import itertools
import logging

from telegrad.errors import is_shortage
from telegrad.execution.run_queue import RunQueue, Task
from telegrad.transport.base import Poller
from telegrad.waiting import Runtime

_log = logging.getLogger("telegrad")

RETRY_DELAY = 0.05  # seconds before retrying what the system refused
_MIN_COMPACTED = 64  # cancelled timers to collect before they are removed from the heap


class Timer:
    """An action to run at a given time. `action` is None once it ran or was cancelled."""

    __slots__ = ("action", "when")

    def __init__(self, when: float, action: Task) -> None:
        self.when = when
        self.action: Task | None = action


class Timers:
    """A priority queue of timers."""

    def __init__(self, runtime: Runtime, poller: Poller, queue: RunQueue, name: str) -> None:
        self._runtime = runtime
        self._poller = poller
        self._queue = queue
        self._name = name
        self._lock = queue.lock  # protects the three below
        self.heap: list[tuple[float, int, Timer]] = []
        self._cancelled = 0
        self._order = itertools.count()  # timers due at the same time run in the order in which they were set

    def at(self, when: float, action: Task) -> Timer:
        """Run `action` at `when`, on a runner. The action must be short."""
        timer = Timer(when, action)
        with self._lock:
            first = not self.heap or when < self.heap[0][0]
            heapq.heappush(self.heap, (when, next(self._order), timer))
            if first and self._queue.polling and not self._queue.stopping:
                self._poller.wake()
        return timer

    def cancel(self, timer: Timer) -> None:
        """Cancel `timer`, unless it has run."""
        with self._lock:
            if timer.action is not None:
                timer.action = None
                self._cancelled += 1
                if self._cancelled > _MIN_COMPACTED and self._cancelled * 2 > len(self.heap):
                    self.heap = [entry for entry in self.heap if entry[2].action is not None]
                    heapq.heapify(self.heap)
                    self._cancelled = 0

    def next_due(self) -> float | None:
        """Return when the first timer is due.

        Needs no lock: only the thread that polls removes timers, and adding an earlier one wakes the poller.
        """
        heap = self.heap
        return heap[0][0] if heap else None

    def run_due(self) -> None:
        """Run all timers that are due. Only the thread that polls may call this."""
        now = self._runtime.now()
        while True:
            with self._lock:
                if not self.heap or self.heap[0][0] > now:
                    return
                timer = heapq.heappop(self.heap)[2]
                action, timer.action = timer.action, None
                if action is None:
                    self._cancelled -= 1
            if action is not None:
                try:
                    action()
                except Exception as error:  # noqa: BLE001 - actions report their own errors; this is a bug or a shortage
                    _log.exception("worker %s: a timer's action failed", self._name)
                    if is_shortage(error):
                        self._retry(timer, action)

    def _retry(self, timer: Timer, action: Task) -> None:
        with self._lock:
            if timer.action is None:
                timer.action, timer.when = action, self._runtime.now() + RETRY_DELAY
                heapq.heappush(self.heap, (timer.when, next(self._order), timer))
