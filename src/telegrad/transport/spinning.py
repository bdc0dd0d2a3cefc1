"""Adaptive spinning: a waiting thread polls for a moment before it sleeps in the kernel.

A call of 100 µs is too short to sleep in: the processor goes idle, waking it takes tens of microseconds, and caches are
cold afterwards. But a spinning thread takes a processor from others. So a thread spins only if its last wait was short,
only for some hundred microseconds, and yields the processor between two polls. If another thread takes it, processors
are scarce, and this thread does not spin for a while.
"""

from __future__ import annotations

from collections.abc import Callable
from os import sched_yield
from time import monotonic
from typing import Any

from telegrad.interrupts import interruptible

SPIN = 400
"""How many microseconds to spin, by default."""
_TAKEN = 0.0004  # if two polls are this many seconds apart, another thread has run
_SCARCE = 0.01  # seconds during which processors then count as scarce


class Spin:
    """Waits for one poll function, in one thread at a time, and spins for up to `limit` microseconds (0: never)."""

    __slots__ = ("_eager", "_limit", "_scarce_until")

    def __init__(self, limit: int = SPIN) -> None:
        self._limit = limit / 1e6
        self._eager = False
        self._scarce_until = 0.0

    @interruptible
    def wait(self, poll: Callable[[float | None], list[Any]], timeout: float | None) -> list[Any]:
        """Return what `poll(timeout)` returns. A timeout may be exceeded by the time of spinning."""
        if not self._limit or timeout == 0:
            return poll(timeout)
        begin = now = monotonic()
        if self._eager and now >= self._scarce_until:
            end = begin + self._limit
            while now < end:
                found = poll(0)
                if found:
                    return found
                sched_yield()
                before, now = now, monotonic()
                if now - before > _TAKEN:
                    self._scarce_until = now + _SCARCE
                    break
        found = poll(timeout)
        self._eager = bool(found) and monotonic() - begin < self._limit
        return found
