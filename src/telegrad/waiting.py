"""The one waiting primitive, and the clock and threads that go with it.

Everything in telegrad that waits, waits for an `Event` made by a `Runtime` (or for a socket, through a transport that
the runtime's owner chose). So the simulation in `telegrad.testing` can take the place of time and threads by giving
agents another runtime, and nothing else has to know.
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
    """A flag that is raised once, by anybody, and waited for by anybody."""

    def set(self) -> None:
        """Raise the flag; raising it again does nothing."""

    def is_set(self) -> bool:
        """Say whether the flag is up."""

    def wait(self, deadline: float | None) -> bool:
        """Wait for the flag, until `deadline` on the runtime's clock (None: for as long as it takes)."""


class Thread(Protocol):
    """A thread that was started by a runtime."""

    def join(self, deadline: float | None) -> bool:
        """Wait for its end; say whether it has ended."""


class Runtime(Protocol):
    """Time, threads and chance, as an agent sees them."""

    preemptive: bool
    """Whether threads run at the same time. If not, a thread that does not wait takes no time."""

    def now(self) -> float:
        """Seconds on a clock that never goes back."""

    def event(self) -> Event:
        """A flag that is down."""

    def start_thread(self, name: str, target: Callable[[], None]) -> Thread:
        """Run `target` on a thread of its own."""

    def random_bits(self, count: int) -> int:
        """An unpredictable whole number below 2**count."""


class _LockEvent:
    """An Event in one lock: waiting is one acquire, which is the cheapest wait that Python has."""

    __slots__ = ("_lock", "_unset")

    def __init__(self) -> None:
        self._lock = allocate_lock()
        self._lock.acquire()
        self._unset = [True]  # popped by the one set() that counts; list.pop is atomic

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
            # Once it is set, the lock is free, but for the moment in which one that waited has it. Who was interrupted
            # cannot know whether it got it: so all let go of it, and to let go once too often does no harm.
            if not self._unset:
                try:  # noqa: SIM105 - suppress() is three Python functions, in every wait
                    self._lock.release()
                except RuntimeError:  # somebody else did
                    pass


class _DaemonThread:
    """A daemon: interpreter exit must not wait for it. Agents join theirs before that."""

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
