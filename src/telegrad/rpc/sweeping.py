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

from telegrad.agent.executor import Executor
from telegrad.waiting import Event, Runtime

_log = logging.getLogger("telegrad")

T = TypeVar("T")


class Sweeper(Generic[T]):
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
            self._executor.start_thread("references", self._run)

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
        while not self._closed:
            # Looked at after there is a flag to raise: nothing is dropped unseen.
            wake = self._wake = self._runtime.event()
            if not self._dropped and not self._closed:
                wake.wait(None)  # raised by `dropped` and by `close`
            while self._dropped:
                self._counted += 1  # before it is taken: see `idle`
                item = self._dropped.popleft()
                try:
                    self._sweep(item)
                except Exception:  # noqa: BLE001 - a fault of ours; the others must still be swept
                    _log.exception("a reference that died was not given up")
                del item
                self._swept += 1
