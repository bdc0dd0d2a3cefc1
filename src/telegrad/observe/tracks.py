"""Distributes spans over tracks so that spans of one track are nested or apart, as trace viewers require.

A thread does one thing at a time, so most of its spans nest. Calls whose callers did not wait, passes, contexts and
transfers overlap. What does not fit on the first track of its row goes to a further one.
"""

from __future__ import annotations

from bisect import bisect_right

import msgspec

MOST_TRACKS = 64
"""Tracks of one row. More cannot be read, and placing a span would take long."""


class Interval(msgspec.Struct, eq=False):
    """A span of time on a track, in ticks: whole numbers, so that nesting is exact."""

    began: int
    ended: int
    """After `began`."""
    holds: bool = True
    """Whether spans that are not part of it may be inside it."""
    _inside: list[Interval] = msgspec.field(default_factory=list)
    _starts: list[int] = msgspec.field(default_factory=list)

    def add(self, interval: Interval, *, part: bool = False) -> bool:
        """Put an interval inside this one, and return whether it fits. Longer ones have to be added first."""
        scope = self
        while True:
            at = bisect_right(scope._starts, interval.began)
            before = scope._inside[at - 1] if at else None
            if before is not None and interval.began < before.ended:
                if interval.ended > before.ended or not (before.holds or part):
                    return False
                scope = before
                continue
            if at < len(scope._inside) and scope._starts[at] < interval.ended:
                return False
            scope._inside.insert(at, interval)
            scope._starts.insert(at, interval.began)
            return True


class Row:
    """The tracks of one thread, or of one kind of spans that overlap. The first is used wherever a span fits."""

    def __init__(self) -> None:
        self._tracks: list[Interval] = []

    def place(self, interval: Interval) -> int | None:
        """Put an interval on the first track on which it fits, and return the track's number; None if there are too
        many tracks."""
        for number, track in enumerate(self._tracks):
            if track.add(interval):
                return number
        if len(self._tracks) == MOST_TRACKS:
            return None
        track = Interval(-_FAR, _FAR)
        track.add(interval)
        self._tracks.append(track)
        return len(self._tracks) - 1

    def add_part(self, track: int, interval: Interval) -> None:
        """Put a part of a span that was just placed on the span's track. It fits if it is inside the span."""
        if not self._tracks[track].add(interval, part=True):
            raise ValueError(f"[{interval.began}, {interval.ended}] is no part of a span on track {track}")

    def __len__(self) -> int:
        return len(self._tracks)


_FAR = 1 << 62
