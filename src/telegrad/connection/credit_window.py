"""Requests that wait for credits: the flow control of one calling direction."""

from __future__ import annotations

import threading
from collections.abc import Callable

from telegrad.protocol.credits import Credits


class CreditWindow:
    """Takes and returns the credits of a channel, and wakes the requests that wait for them."""

    def __init__(self, credits: Credits, lock: threading.Lock) -> None:
        self._credits = credits
        self._lock = lock  # the channel's; protects the credits and `waiters`
        self.waiters: list[Callable[[], None]] = []  # nearly always empty, which a deque is not for free

    def acquire(self, size: int, wake: Callable[[], None]) -> bool:
        """Take credits for a request of `size` bytes. If there are none, `wake` is called when it is worth a retry."""
        with self._lock:
            if self._credits.acquire(size):
                return True
            self.waiters.append(wake)
            return False

    def extend(self, size: int) -> None:
        """Count `size` bytes more for a request that has credits."""
        with self._lock:
            self._credits.extend(size)

    def cancel(self, wake: Callable[[], None]) -> None:
        """Stop waiting for credits. If `wake` was already called, another waiter is woken instead."""
        with self._lock:
            if wake in self.waiters:
                self.waiters.remove(wake)
                return
            wake_next = self.waiters.pop(0) if self.waiters else None
        if wake_next is not None:
            wake_next()

    def release(self, size: int) -> None:
        """Return the credits of a request that was answered or given up, and wake the first waiter."""
        with self._lock:
            self._credits.release(size)
            wake_next = self.waiters.pop(0) if self.waiters else None
        if wake_next is not None:
            wake_next()

    def release_waiters(self) -> list[Callable[[], None]]:
        """Return all waiters and forget them: the channel is closed. Call with the lock held."""
        waiters = list(self.waiters)
        self.waiters.clear()
        return waiters
