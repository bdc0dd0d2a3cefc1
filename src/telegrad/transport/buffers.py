"""Memory for bulk, used again: touching fresh pages costs several times as much as copying into them.

A buffer is free again when nobody but the pool refers to it. A tensor made over it holds a reference for as long as
its storage lives, so the reference count says it, and nobody has to hand anything back.
"""

from __future__ import annotations

import mmap
import sys
import threading

_SMALLEST = 64 * 1024
_LARGE = 4 * 1024 * 1024


def _count_references(buffers: list[bytearray]) -> int:
    """Return the reference count of a buffer that only the list holds, as the loops of the pool see it."""
    count = 0
    for buffer in buffers:
        count = sys.getrefcount(buffer)
    return count


# Measured, because interpreters differ in whether loop variables and arguments count: 3 until Python 3.13, 2 in 3.14.
_HELD_BY_POOL_ONLY = _count_references([bytearray(1)])


class BufferPool:
    """Keeps up to `keep` bytes of buffers that were used before."""

    def __init__(self, keep: int = 512 * 1024 * 1024) -> None:
        self._keep = keep
        self._lock = threading.Lock()  # protects _buffers and _total
        self._buffers: list[bytearray | mmap.mmap] = []
        self._total = 0

    def take(self, size: int) -> memoryview:
        """A writable buffer of exactly `size` bytes, with any content."""
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
        # A function of its own, so that its loop variable refers to no buffer while `_make_room` counts references.
        for buffer in self._buffers:
            if len(buffer) == size and sys.getrefcount(buffer) == _HELD_BY_POOL_ONLY:
                return memoryview(buffer)
        return None

    def _make_room(self, size: int) -> None:
        """Forget free buffers, oldest first, until `size` bytes more may be kept."""
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
        """Keep no buffer that is free."""
        with self._lock:
            self._make_room(self._keep)

    def held(self) -> int:
        """Bytes that the pool keeps, in use or free."""
        return self._total


def _fresh(size: int) -> bytearray | mmap.mmap:
    """New memory. A bytearray is filled with zeros at once; this is not touched before it is used, and in large pages,
    if the system has them: with those, touching it costs a quarter."""
    if size < _LARGE:
        return bytearray(size)
    try:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"there is no memory for {size:,} bytes") from error
    try:
        memory.madvise(mmap.MADV_HUGEPAGE)
    except (AttributeError, OSError):  # a system without them
        return memory
    return memory


def _rounded(size: int) -> int:
    """Sizes in steps of a quarter of their power of two, so that nearly equal messages share buffers."""
    step = max(_SMALLEST, 1 << max(0, size.bit_length() - 3))
    return (size + step - 1) // step * step
