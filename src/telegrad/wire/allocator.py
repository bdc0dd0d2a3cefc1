"""Allocate regions in a block of memory.

This tracks offsets only. `telegrad.transport` owns the memory itself.

>>> allocator = Allocator(64 * 1024)
>>> allocator.allocate(10_000), allocator.allocate(10_000)
(0, 12288)
>>> allocator.free(0)
>>> allocator.allocate(8_000), allocator.allocate(60_000)
(0, None)
"""

from __future__ import annotations

from bisect import bisect_left

_STEP = 4096  # a page


def rounded_size(size: int) -> int:
    """Return the bytes allocated for `size`: in steps of a quarter of its power of two, so similar sizes are equal.

    >>> rounded_size(1), rounded_size(64 * 1024), rounded_size(64 * 1024 + 1)
    (4096, 65536, 81920)
    """
    step = max(_STEP, 1 << max(0, size.bit_length() - 3))
    return (size + step - 1) // step * step


class Allocator:
    """A first-fit allocator for a block of `size` bytes. Freed neighbours are merged."""

    __slots__ = ("_allocated", "_gap_sizes", "_gaps", "in_use", "size")

    def __init__(self, size: int) -> None:
        self.size = size
        self.in_use = 0
        """Allocated bytes."""
        # Offsets of the gaps in ascending order, and their sizes. No two gaps touch.
        self._gaps = [0]
        self._gap_sizes = [size]
        self._allocated: dict[int, int] = {}  # offset -> size

    def allocate(self, size: int) -> int | None:
        """Return the lowest free offset of `rounded_size(size)` bytes, or None. Low offsets are likely cached."""
        needed = rounded_size(size)
        for index, available in enumerate(self._gap_sizes):
            if available >= needed:
                offset = self._gaps[index]
                if available == needed:
                    del self._gaps[index], self._gap_sizes[index]
                else:
                    self._gaps[index] += needed
                    self._gap_sizes[index] -= needed
                self._allocated[offset] = needed
                self.in_use += needed
                return offset
        return None

    def free(self, offset: int) -> None:
        """Free the bytes allocated at `offset`. Raise KeyError if there are none."""
        size = self._allocated.pop(offset)
        self.in_use -= size
        index = bisect_left(self._gaps, offset)
        if index < len(self._gaps) and offset + size == self._gaps[index]:
            size += self._gap_sizes[index]
            del self._gaps[index], self._gap_sizes[index]
        if index and self._gaps[index - 1] + self._gap_sizes[index - 1] == offset:
            self._gap_sizes[index - 1] += size
        else:
            self._gaps.insert(index, offset)
            self._gap_sizes.insert(index, size)
