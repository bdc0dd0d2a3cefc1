"""The set of sequence numbers that were received from one sender, in any order and with gaps.

The sender uses numbers of the same series for other receivers, too. So each message says which number the previous one
to this receiver had: the numbers in between were sent elsewhere and are not missing.

>>> numbers = SequenceSet()
>>> numbers.add(1), numbers.add(6, after=4), numbers.add(3, after=1)
(None, None, None)
>>> [number for number in range(9) if numbers.is_missing(number)]
[4, 7, 8]
"""

from __future__ import annotations

from bisect import bisect_right


class SequenceSet:
    """Numbers that were received or never will be. Memory grows with the number of gaps, not with their width."""

    __slots__ = ("_gaps", "_next")

    def __init__(self) -> None:
        self._next = 0  # one above the highest that was received
        self._gaps: list[tuple[int, int]] = []  # half-open ranges below `_next` that are missing, sorted

    def add(self, number: int, after: int = -1) -> None:
        """Add `number`, and exclude those between `after` and it. Adding a number again does nothing."""
        first = min(after + 1, number)
        if first > self._next:
            self._gaps.append((self._next, first))
        elif self._gaps:
            self._fill(first, number + 1)
        self._next = max(self._next, number + 1)

    def _fill(self, first: int, end: int) -> None:
        """Remove the range from the gaps."""
        start = max(0, bisect_right(self._gaps, first, key=lambda gap: gap[0]) - 1)
        until = start
        left = []
        while until < len(self._gaps) and self._gaps[until][0] < end:
            gap = self._gaps[until]
            left += [part for part in ((gap[0], min(gap[1], first)), (max(gap[0], end), gap[1])) if part[0] < part[1]]
            until += 1
        self._gaps[start:until] = left

    def is_missing(self, number: int) -> bool:
        """Return whether `number` may still be received."""
        if number >= self._next:
            return True
        index = bisect_right(self._gaps, number, key=lambda gap: gap[0]) - 1
        return index >= 0 and number < self._gaps[index][1]

    def gaps(self) -> int:
        """Return the number of gaps."""
        return len(self._gaps)
