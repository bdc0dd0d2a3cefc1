"""Which of a sender's numbered messages have come, though they may come in any order and some never do.

>>> arrivals = Arrivals()
>>> arrivals.came(0), arrivals.came(5), arrivals.came(2)
(None, None, None)
>>> [number for number in range(8) if arrivals.to_come(number)]
[1, 3, 4, 6, 7]
"""

from __future__ import annotations

from bisect import bisect_right


class Arrivals:
    """The numbers that have come. It takes memory for the gaps only, however wide they are."""

    __slots__ = ("_gaps", "_next")

    def __init__(self) -> None:
        self._next = 0  # above all that have come
        self._gaps: list[tuple[int, int]] = []  # below that: the first that has not come, and the first that has

    def came(self, number: int) -> None:
        """This one has come; once more counts for nothing."""
        if number >= self._next:
            if number > self._next:
                self._gaps.append((self._next, number))
            self._next = number + 1
            return
        place = self._gap_of(number)
        if place is not None:
            first, end = self._gaps[place]
            left = [gap for gap in ((first, number), (number + 1, end)) if gap[0] < gap[1]]
            self._gaps[place : place + 1] = left

    def to_come(self, number: int) -> bool:
        """Whether this one has not come."""
        return number >= self._next or self._gap_of(number) is not None

    def gaps(self) -> int:
        """How many gaps there are."""
        return len(self._gaps)

    def _gap_of(self, number: int) -> int | None:
        place = bisect_right(self._gaps, number, key=lambda gap: gap[0]) - 1
        return place if place >= 0 and number < self._gaps[place][1] else None
