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
            self._lock.release()

    def is_set(self) -> bool:
        return not self._unset

    def wait(self, deadline: float | None) -> bool:
        if not self._unset:
            return True
        if deadline is None:
            self._lock.acquire()
        elif not self._lock.acquire(timeout=min(max(0.0, deadline - time.monotonic()), threading.TIMEOUT_MAX)):
            return False
        self._lock.release()
        return True


class _DaemonThread:
    """A daemon: interpreter exit must not wait for it. Agents join theirs before that."""

    __slots__ = ("_thread",)

    def __init__(self, name: str, target: Callable[[], None]) -> None:
        self._thread = threading.Thread(target=target, name=name, daemon=True)
        self._thread.start()

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
