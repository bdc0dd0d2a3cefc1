"""Puts the times of all workers on one clock, so that no message arrives before it was sent.

`GroupView.offsets` are estimates: each is wrong by up to half a round trip. Messages between workers tell more, because
a message cannot arrive before it is sent. Each gives a bound for the difference of two offsets, and `align` finds
offsets near the estimates that keep all bounds (difference constraints, solved by relaxation as Bellman and Ford do).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

Message = tuple[str, float, str, float]
"""Sender and its time, which is not later than the sending; receiver and its time, not earlier than the arrival."""


def align(offsets: Mapping[str, float], messages: Iterable[Message]) -> dict[str, float]:
    """Return offsets with which no message arrives before it was sent.

    Returns the estimates if there are no such offsets: if a clock was set, or runs much faster than another.

    >>> align({"a": 0.0, "b": 0.0}, [("a", 10.0, "b", 9.5), ("b", 9.6, "a", 10.2)])
    {'a': -0.5, 'b': 0.0}
    """
    bounds: dict[tuple[str, str], float] = {}  # offset of the first <= offset of the second + bound
    for sender, sent, receiver, arrived in messages:
        if sender != receiver and sender in offsets and receiver in offsets:
            pair = sender, receiver
            bounds[pair] = min(bounds.get(pair, arrived - sent), arrived - sent)
    aligned = dict(offsets)
    for _ in range(len(aligned) + 1):
        changed = False
        for (sender, receiver), bound in sorted(bounds.items()):
            if aligned[sender] > aligned[receiver] + bound + _PRECISION:
                aligned[sender] = aligned[receiver] + bound
                changed = True
        if not changed:
            return aligned
    return dict(offsets)


_PRECISION = 1e-9  # seconds; sums of clocks that count from 1970 would never agree exactly
