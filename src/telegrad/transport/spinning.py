"""Look before you sleep: a waiting thread asks again and again for a moment, and only then lets the kernel wake it.

A call of 100 µs is too short to sleep in: the processor goes idle, to wake it takes tens of microseconds, and what runs
then finds cold caches. But whoever looks takes a processor from those who could use it. So a thread looks only if its
last wait was short, only for some hundred microseconds, and offers the processor to others between two looks. If one of
them takes it, processors are scarce, and this thread sleeps like any other for a while.
"""

from __future__ import annotations

from collections.abc import Callable
from os import sched_yield
from time import monotonic
from typing import Any

from telegrad.interrupts import interruptible

SPIN = 400
"""Microseconds to look, by default."""
_TAKEN = 0.0004  # seconds between two looks in which somebody else must have run
_SCARCE = 0.01  # seconds for which processors are then taken to be scarce


class Spin:
    """How threads wait at one place, one at a time; with `most` microseconds of looking, or 0 for none."""

    __slots__ = ("_eager", "_most", "_scarce_until")

    def __init__(self, most: int = SPIN) -> None:
        self._most = most / 1e6
        self._eager = False
        self._scarce_until = 0.0

    @interruptible
    def wait(self, poll: Callable[[float | None], list[Any]], timeout: float | None) -> list[Any]:
        """What `poll(timeout)` returns. A timeout may pass by as long as this looks."""
        if not self._most or timeout == 0:
            return poll(timeout)
        begin = now = monotonic()
        if self._eager and now >= self._scarce_until:
            end = begin + self._most
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
        self._eager = bool(found) and monotonic() - begin < self._most
        return found
