"""What happens to handles that die: in any thread, at any moment, in the middle of anything.

A destructor may run while its thread holds a lock, this module's users' locks among them. So it only appends to a deque
and raises a flag, neither of which takes a lock; a thread of its own does the rest.
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
    """Has `sweep` called, on one thread, with everything that was `dropped`."""

    def __init__(self, runtime: Runtime, executor: Executor, sweep: Callable[[T], None]) -> None:
        self._runtime = runtime
        self._executor = executor
        self._sweep = sweep
        self._lock = threading.Lock()  # protects _begun
        self._begun = False
        self._closed = False
        self._dropped: deque[T] = deque()
        self._wake: Event | None = None
        self._swept = 0
        self._counted = 0

    def start(self) -> None:
        """To be called before there is anything that could die; again does nothing."""
        if self._begun:
            return
        with self._lock:
            begun, self._begun = self._begun, True
        if not begun:
            try:
                self._executor.threads.start("references", self._run)
            except ResourceExhausted as error:
                _log.warning("%s. References that die are given up later", error)
                self._begun = False
                self._executor.timers.at(self._runtime.now() + RETRY_DELAY, self.start)

    def dropped(self, item: T) -> None:
        """Called by destructors: no lock may be taken here."""
        if self._closed:
            return
        self._dropped.append(item)
        wake = self._wake
        if wake is not None:
            wake.set()

    def idle(self) -> bool:
        """Whether everything that was dropped has been swept."""
        return not self._dropped and self._swept == self._counted

    def close(self) -> None:
        """Stop; what is dropped from now on matters to nobody."""
        self._closed = True
        if self._wake is not None:
            self._wake.set()

    def _run(self) -> None:
        pause = self._runtime.event()  # never set; made while there is memory for it
        while not self._closed:
            try:
                self._sweep_once()
            except Exception:  # noqa: BLE001 - no memory, most likely; what is dropped later must still be swept
                _log.exception("what sweeps references failed; it goes on")
                pause.wait(self._runtime.now() + RETRY_DELAY)

    def _sweep_once(self) -> None:
        """Wait until something is dropped, and sweep all that was."""
        # Looked at after there is a flag to raise: nothing is dropped unseen.
        wake = self._wake = self._runtime.event()
        if not self._dropped and not self._closed:
            wake.wait(None)  # raised by `dropped` and by `close`
        while self._dropped:
            self._counted += 1  # before it is taken: see `idle`
            try:
                item = self._dropped.popleft()
                self._sweep(item)
            except Exception:  # noqa: BLE001 - a fault of ours; the others must still be swept
                _log.exception("a reference that died was not given up")
            finally:
                self._swept += 1
                item = None  # type: ignore[assignment]  # or it would live until the next one dies
