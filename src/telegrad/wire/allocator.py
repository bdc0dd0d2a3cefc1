"""Which parts of a block of memory are in use: whoever lends regions of the block keeps one of these about it.

Numbers only, no memory: the block itself is the business of `telegrad.transport`.

>>> arena = Allocator(64 * 1024)
>>> arena.take(10_000), arena.take(10_000)
(0, 12288)
>>> arena.give_back(0)
>>> arena.take(8_000), arena.take(60_000)
(0, None)
"""

from __future__ import annotations

from bisect import bisect_left

_STEP = 4096  # a page


def rounded(size: int) -> int:
    """How much is taken for `size` bytes: steps of a quarter of their power of two, so like sizes are the same.

    >>> rounded(1), rounded(64 * 1024), rounded(64 * 1024 + 1)
    (4096, 65536, 81920)
    """
    step = max(_STEP, 1 << max(0, size.bit_length() - 3))
    return (size + step - 1) // step * step


class Allocator:
    """A block of `size` bytes. What is taken never overlaps, and is joined again when it is given back."""

    __slots__ = ("_free", "_sizes", "_taken", "in_use", "size")

    def __init__(self, size: int) -> None:
        self.size = size
        self.in_use = 0
        """Bytes that are taken."""
        # The gaps by offset, and their sizes beside them: no two gaps touch.
        self._free = [0]
        self._sizes = [size]
        self._taken: dict[int, int] = {}  # offset -> size

    def take(self, size: int) -> int | None:
        """The offset of `rounded(size)` bytes, the lowest that there is: what was used before is warm. Or None."""
        needed = rounded(size)
        for index, available in enumerate(self._sizes):
            if available >= needed:
                offset = self._free[index]
                if available == needed:
                    del self._free[index], self._sizes[index]
                else:
                    self._free[index] += needed
                    self._sizes[index] -= needed
                self._taken[offset] = needed
                self.in_use += needed
                return offset
        return None

    def give_back(self, offset: int) -> None:
        """Free what was taken at `offset`. A KeyError says that nothing was."""
        size = self._taken.pop(offset)
        self.in_use -= size
        index = bisect_left(self._free, offset)
        if index < len(self._free) and offset + size == self._free[index]:
            size += self._sizes[index]
            del self._free[index], self._sizes[index]
        if index and self._free[index - 1] + self._sizes[index - 1] == offset:
            self._sizes[index - 1] += size
        else:
            self._free.insert(index, offset)
            self._sizes.insert(index, size)
