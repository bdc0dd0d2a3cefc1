"""A pool of buffers for large messages: touching fresh pages costs several times as much as copying into them.

A buffer is free when only the pool refers to it. A tensor made over it holds a reference for as long as its storage
lives. So the reference count tells, and nobody has to return a buffer.
"""

from __future__ import annotations

import mmap
import sys
import threading

_SMALLEST = 64 * 1024
_LARGE = 4 * 1024 * 1024


def _count_in_pool() -> int:
    """Return the reference count of a buffer that only a list refers to, as a loop over the list sees it.

    The list, the loop variable and the argument of getrefcount count in CPython 3.11. Other versions differ, and a
    wrong guess would hand out a buffer that is in use.
    """
    for buffer in [bytearray()]:
        count = sys.getrefcount(buffer)
    return count


_HELD_BY_POOL_ONLY = _count_in_pool()


class BufferPool:
    """Keeps up to `keep` bytes of buffers for reuse."""

    def __init__(self, keep: int = 512 * 1024 * 1024) -> None:
        self._keep = keep
        self._lock = threading.Lock()  # protects _buffers and _total
        self._buffers: list[bytearray | mmap.mmap] = []
        self._total = 0

    def take(self, size: int) -> memoryview:
        """Return a writable buffer of exactly `size` bytes, with arbitrary content."""
        if size < _SMALLEST:
            return memoryview(bytearray(size))
        rounded = _rounded(size)
        with self._lock:
            free = self._find(rounded)
        if free is not None:
            return free[:size]
        fresh = _fresh(rounded)
        with self._lock:
            self._make_room(rounded)
            if self._total + rounded <= self._keep:
                self._buffers.append(fresh)
                self._total += rounded
        return memoryview(fresh)[:size]

    def _find(self, size: int) -> memoryview | None:
        # A separate function, so that its loop variable does not refer to a buffer while `_make_room` counts.
        for buffer in self._buffers:
            if len(buffer) == size and sys.getrefcount(buffer) == _HELD_BY_POOL_ONLY:
                return memoryview(buffer)
        return None

    def _make_room(self, size: int) -> None:
        """Drop free buffers, oldest first, until `size` more bytes may be kept."""
        if self._total + size <= self._keep:
            return
        kept = []
        for buffer in self._buffers:
            if self._total + size > self._keep and sys.getrefcount(buffer) == _HELD_BY_POOL_ONLY:
                self._total -= len(buffer)
            else:
                kept.append(buffer)
        self._buffers = kept

    def trim(self) -> None:
        """Drop all free buffers."""
        with self._lock:
            self._make_room(self._keep)

    def held(self) -> int:
        """Return how many bytes the pool keeps, in use or free."""
        return self._total


def _fresh(size: int) -> bytearray | mmap.mmap:
    """Allocate memory. A large buffer is not touched before it is used, unlike a bytearray, which is zeroed at once.
    It has huge pages, if the system supports them: touching those costs a quarter."""
    if size < _LARGE:
        return bytearray(size)
    try:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"cannot allocate {size:,} bytes") from error
    try:
        memory.madvise(mmap.MADV_HUGEPAGE)
    except (AttributeError, OSError):  # not supported by this system
        return memory
    return memory


def _rounded(size: int) -> int:
    """Round up in steps of a quarter of the power of two, so that nearly equal messages share buffers."""
    step = max(_SMALLEST, 1 << max(0, size.bit_length() - 3))
    return (size + step - 1) // step * step
