"""Which of a sender's numbered messages have come, though they may come in any order and some never do.

The sender uses numbers of the same series for others as well. So it says with each message which number the one before
it had: those between are not for us.

>>> arrivals = SequenceSet()
>>> arrivals.came(1), arrivals.came(6, after=4), arrivals.came(3, after=1)
(None, None, None)
>>> [number for number in range(9) if arrivals.to_come(number)]
[4, 7, 8]
"""

from __future__ import annotations

from bisect import bisect_right


class SequenceSet:
    """The numbers that have come, or never will. It takes memory for the gaps only, however wide they are."""

    __slots__ = ("_gaps", "_next")

    def __init__(self) -> None:
        self._next = 0  # above all that have come
        self._gaps: list[tuple[int, int]] = []  # below that: the first that has not come, and the first that has

    def came(self, number: int, after: int = -1) -> None:
        """This one has come, and those between `after` and it never will; once more counts for nothing."""
        first = min(after + 1, number)
        if first > self._next:
            self._gaps.append((self._next, first))
        elif self._gaps:
            self._fill(first, number + 1)
        self._next = max(self._next, number + 1)

    def _fill(self, first: int, end: int) -> None:
        """These are no gaps any more."""
        place = max(0, bisect_right(self._gaps, first, key=lambda gap: gap[0]) - 1)
        until = place
        left = []
        while until < len(self._gaps) and self._gaps[until][0] < end:
            gap = self._gaps[until]
            left += [part for part in ((gap[0], min(gap[1], first)), (max(gap[0], end), gap[1])) if part[0] < part[1]]
            until += 1
        self._gaps[place:until] = left

    def to_come(self, number: int) -> bool:
        """Whether this one has not come."""
        return number >= self._next or self._gap_of(number) is not None

    def gaps(self) -> int:
        """How many gaps there are."""
        return len(self._gaps)

    def _gap_of(self, number: int) -> int | None:
        place = bisect_right(self._gaps, number, key=lambda gap: gap[0]) - 1
        return place if place >= 0 and number < self._gaps[place][1] else None
