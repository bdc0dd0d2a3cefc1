"""Releases garbage-collected handles on a separate thread.

A destructor may run in any thread at any moment, even while its thread holds one of our locks. So it only appends to a
deque and sets an event, neither of which takes a lock. A separate thread does the rest.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from telegrad.errors import ResourceExhausted
from telegrad.execution.executor import Executor
from telegrad.execution.timers import RETRY_DELAY
from telegrad.waiting import Event, Runtime

_log = logging.getLogger("telegrad")

T = TypeVar("T")


class Finalizer(Generic[T]):
    """Calls `finalize` on one thread with every item that destructors enqueue."""

    def __init__(self, runtime: Runtime, executor: Executor, finalize: Callable[[T], None]) -> None:
        self._runtime = runtime
        self._executor = executor
        self._finalize = finalize
        self._lock = threading.Lock()  # protects _started
        self._started = False
        self._closed = False
        self._queue: deque[T] = deque()
        self._wake: Event | None = None
        self._taken = 0
        self._finished = 0

    def start(self) -> None:
        """Start the thread, unless it runs. Call this before creating anything that needs finalizing."""
        if self._started:
            return
        with self._lock:
            started, self._started = self._started, True
        if not started:
            try:
                self._executor.threads.start("references", self._run)
            except ResourceExhausted as error:
                _log.warning("%s. Garbage-collected references are released later", error)
                self._started = False
                self._executor.timers.at(self._runtime.now() + RETRY_DELAY, self.start)

    def enqueue(self, item: T) -> None:
        """Have an item finalized. Called by destructors, so it takes no lock."""
        if self._closed:
            return
        self._queue.append(item)
        wake = self._wake
        if wake is not None:
            wake.set()

    def idle(self) -> bool:
        """Return whether all enqueued items have been finalized."""
        return not self._queue and self._finished == self._taken

    def close(self) -> None:
        """Stop the thread. Items that are enqueued later are ignored."""
        self._closed = True
        if self._wake is not None:
            self._wake.set()

    def _run(self) -> None:
        pause = self._runtime.event()  # never set; created now, while there is memory for it
        while not self._closed:
            try:
                self._finalize_queued()
            except Exception:  # noqa: BLE001 - most likely out of memory; later items must still be finalized
                _log.exception("The thread that releases references failed; it will retry")
                pause.wait(self._runtime.now() + RETRY_DELAY)

    def _finalize_queued(self) -> None:
        """Wait until the queue has items, and finalize them all."""
        # Create the event before looking at the queue, so that no item is missed.
        wake = self._wake = self._runtime.event()
        if not self._queue and not self._closed:
            wake.wait(None)  # set by `enqueue` and by `close`
        while self._queue:
            self._taken += 1  # before the item leaves the queue: see `idle`
            try:
                item = self._queue.popleft()
                self._finalize(item)
            except Exception:  # noqa: BLE001 - a bug in telegrad; the other items must still be finalized
                _log.exception("A garbage-collected reference was not released")
            finally:
                self._finished += 1
                item = None  # type: ignore[assignment]  # or the item would stay alive until the next one
