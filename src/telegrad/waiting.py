"""Events, the clock and threads, behind one interface.

All waiting in telegrad is for an `Event` made by a `Runtime`, or for a socket through a transport. So the simulation in
`telegrad.testing` replaces the clock and threads by giving agents another runtime; no other code changes.
"""

from __future__ import annotations

import secrets
import threading
import time
from _thread import allocate_lock
from collections.abc import Callable
from typing import Protocol

from telegrad.interrupts import interruptible


class Event(Protocol):
    """A flag that any thread can set once and any thread can wait for."""

    def set(self) -> None:
        """Set the flag. Setting it again does nothing."""

    def is_set(self) -> bool:
        """Return whether the flag is set."""

    def wait(self, deadline: float | None) -> bool:
        """Wait for the flag until `deadline` on the runtime's clock (None: forever). Return whether it is set."""


class Thread(Protocol):
    """A thread started by a runtime."""

    def join(self, deadline: float | None) -> bool:
        """Wait for its end until `deadline`. Return whether it has ended."""


class Runtime(Protocol):
    """Clock, threads and randomness."""

    preemptive: bool
    """Whether threads run concurrently. If not, a thread that does not wait takes no time."""

    def now(self) -> float:
        """Return the seconds of a monotonic clock."""

    def event(self) -> Event:
        """Return a new event that is not set."""

    def start_thread(self, name: str, target: Callable[[], None]) -> Thread:
        """Run `target` in a new thread."""

    def random_bits(self, count: int) -> int:
        """Return an unpredictable integer in the range [0, 2**count)."""


class _LockEvent:
    """An Event made of one lock: waiting is one acquire, the cheapest wait in Python."""

    __slots__ = ("_lock", "_unset")

    def __init__(self) -> None:
        self._lock = allocate_lock()
        self._lock.acquire()
        self._unset = [True]  # popped by the first set(); list.pop is atomic

    def set(self) -> None:
        if self._unset:
            try:
                self._unset.pop()
            except IndexError:  # another thread was first
                return
            try:
                self._lock.release()
            except RuntimeError:  # see wait
                return

    def is_set(self) -> bool:
        return not self._unset

    @interruptible
    def wait(self, deadline: float | None) -> bool:
        if not self._unset:
            return True
        try:
            if deadline is None:
                return self._lock.acquire()
            return self._lock.acquire(timeout=min(max(0.0, deadline - time.monotonic()), threading.TIMEOUT_MAX))
        finally:
            # Once the event is set, the lock is free, except while a waiter briefly holds it. A waiter that was
            # interrupted cannot know whether it acquired the lock. So all waiters release it; an extra release is
            # harmless.
            if not self._unset:
                try:  # noqa: SIM105 - suppress() is three Python functions, in every wait
                    self._lock.release()
                except RuntimeError:  # another thread released it
                    pass


class _DaemonThread:
    """A daemon thread, so that interpreter exit does not wait for it. Agents join their threads before that."""

    __slots__ = ("_thread",)

    def __init__(self, name: str, target: Callable[[], None]) -> None:
        self._thread = threading.Thread(target=target, name=name, daemon=True)
        self._thread.start()

    @interruptible
    def join(self, deadline: float | None) -> bool:
        self._thread.join(None if deadline is None else max(0.0, deadline - time.monotonic()))
        return not self._thread.is_alive()


class RealRuntime:
    """The operating system's clock and threads."""

    preemptive = True
    now = staticmethod(time.monotonic)

    def event(self) -> Event:
        return _LockEvent()

    def start_thread(self, name: str, target: Callable[[], None]) -> Thread:
        return _DaemonThread(name, target)

    def random_bits(self, count: int) -> int:
        return secrets.randbits(count)
