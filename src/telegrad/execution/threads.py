"""Starts, counts and joins the threads of one executor."""

from __future__ import annotations

import itertools
import logging
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import torch

from telegrad.errors import ResourceExhausted
from telegrad.execution.thread_state import ThreadState
from telegrad.waiting import Runtime, Thread

_log = logging.getLogger("telegrad")

_GRACE = 1.0  # seconds that `join` adds for threads that missed the deadline


class Threads:
    """The threads that an executor started and that are still alive."""

    def __init__(self, runtime: Runtime, lock: threading.Lock, current: ThreadState, name: str) -> None:
        self._runtime = runtime
        self._lock = lock  # the executor's; protects _alive and _idents
        self._current = current
        self._name = name
        self._numbers = itertools.count(1)
        self._alive: dict[int, Thread] = {}
        self._idents: dict[int, int] = {}  # of those that run
        self.device_index: int | None = None
        """The accelerator that is current on these threads at first; None: the first one."""

    def start(self, role: str, target: Callable[[], object]) -> None:
        """Run `target` on a new thread, which `join` waits for. Raises ResourceExhausted if none can be started."""
        with self._lock:
            number = self.reserve()

        def run() -> None:
            self.enter(number)
            try:
                target()
            except Exception:  # noqa: BLE001 - nobody else would see it
                _log.exception("worker %s: the %s thread ended", self._name, role)
            finally:
                with self._lock:
                    self.discard(number)

        try:
            self.launch(number, role, run)
        except Exception as error:
            with self._lock:
                self.discard(number)
            raise self.exhausted(error) from error

    def reserve(self) -> int:
        """Return the number of a thread that is about to be started. Call with the lock held."""
        number = next(self._numbers)
        self._alive[number] = _Starting()
        return number

    def launch(self, number: int, role: str, run: Callable[[], None]) -> None:
        """Start the thread `number`. Call without the lock: this waits until the thread runs."""
        thread = self._runtime.start_thread(f"telegrad:{self._name}:{role}", run)
        with self._lock:
            if number in self._alive:  # it may have ended already
                self._alive[number] = thread

    def enter(self, number: int) -> None:
        """Prepare the current thread, which is thread `number`."""
        self._current.number = number
        self._idents[number] = threading.get_ident()
        torch.get_num_threads()  # otherwise torch starts an intra-op pool for this thread, ignoring the configured size
        if self.device_index is not None:
            torch.accelerator.set_device_index(self.device_index)

    def discard(self, number: int) -> None:
        """Forget a thread that ends or could not be started. Call with the lock held."""
        self._alive.pop(number, None)
        self._idents.pop(number, None)

    def join(self, deadline: float) -> list[str]:
        """Wait for all threads except the current one. Returns what those execute that did not end."""
        own = self._current.number
        while True:
            with self._lock:
                alive = {number: thread for number, thread in self._alive.items() if number != own}
            late = [number for number, thread in alive.items() if not thread.join(deadline)]
            # If this thread itself was delayed, the deadline may have passed before the others had a chance to end.
            extended = self._runtime.now() + _GRACE
            stuck = [number for number in late if not alive[number].join(extended)]
            if stuck or not alive:
                return [_place_of(self._idents.get(number)) for number in stuck]

    def count(self) -> int:
        """Return the number of live threads, for debug info."""
        with self._lock:
            return len(self._alive)

    def exhausted(self, error: Exception | None) -> ResourceExhausted:
        """Return the error to raise when the system refuses a thread."""
        return ResourceExhausted(
            f"worker {self._name!r} cannot start a thread: {error}. Raise its limit of threads (ulimit -u, pids.max) "
            "or of memory",
            worker=self._name,
        )


def _place_of(ident: int | None) -> str:
    """Return what a thread executes: the innermost line that is not telegrad's, or else the innermost line."""
    innermost = sys._current_frames().get(ident or 0)
    frame = innermost
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in ("telegrad", "threading"):
        frame = frame.f_back
    frame = frame or innermost
    if frame is None:
        return "a thread that has just ended"
    return f"{frame.f_code.co_qualname} ({Path(frame.f_code.co_filename).name}:{frame.f_lineno})"


class _Starting:
    """Placeholder for a thread that has a number but has not started yet."""

    def join(self, deadline: float | None) -> bool:
        return True
