"""Says how the workers of a timeline spent their time.

At any time a worker is in one state, the first of these that holds: it *computes* (a function, an island, or a step,
without the waits inside), it *serialises*, a message to or from it is in *transfer*, it *waits* (for a reply, a
gradient, a free thread, or the rest of a pass), or it is *idle* as far as telegrad knows: the program's own work
between calls is not recorded.
"""

from __future__ import annotations

from collections import defaultdict

import msgspec

from telegrad.observe.timeline import Category, Part, Span, Timeline

Intervals = list[tuple[float, float]]


class Share(msgspec.Struct, frozen=True):
    """How one worker spent its time, as parts of 1."""

    worker: str
    compute: float
    serialise: float
    transfer: float
    wait: float
    calls: int
    """Calls that it served."""

    @property
    def busy(self) -> float:
        """Return for which part of the time it computed or serialised."""
        return self.compute + self.serialise

    @property
    def idle(self) -> float:
        """Return for which part of the time nothing is known of it."""
        return max(0.0, 1.0 - self.busy - self.transfer - self.wait)

    def parts(self) -> dict[str, float]:
        """Return all of it by name, for programs."""
        shares = {"compute": self.compute, "serialise": self.serialise, "transfer": self.transfer, "wait": self.wait}
        return {name: round(share, 6) for name, share in {**shares, "idle": self.idle}.items()}


def summarize(timeline: Timeline) -> list[Share]:
    """Return how each worker spent the time of a timeline."""
    whole = timeline.ended - timeline.began
    by_worker: dict[int, list[Span]] = defaultdict(list)
    for span in timeline.spans:
        by_worker[span.worker].append(span)
    shares = []
    for number, view in enumerate(timeline.workers):
        spans = by_worker[number]
        parts = [length / whole if whole > 0 else 0.0 for length in _lengths(spans, timeline.began, timeline.ended)]
        calls = sum(span.category is Category.SERVE and not span.open for span in spans)
        shares.append(Share(view.name, parts[0], parts[1], parts[2], parts[3], calls))
    return shares


def table(shares: list[Share]) -> str:
    """Return the shares as lines of text."""
    width = max([len(share.worker) for share in shares] + [6])
    lines = [f"{'worker':{width}}    busy  (serialise)  transfer  waiting    idle  calls served"]
    for share in shares:
        lines.append(
            f"{share.worker:{width}}  {share.busy:6.1%}  {share.serialise:11.1%}  {share.transfer:8.1%}  "
            f"{share.wait:7.1%}  {share.idle:6.1%}  {share.calls:12}"
        )
    return "\n".join(lines)


def _lengths(spans: list[Span], began: float, ended: float) -> list[float]:
    """Return how long a worker computed, serialised, transferred and waited."""
    work: dict[int, Intervals] = defaultdict(list)  # by thread, as the next
    interruptions: dict[int, Intervals] = defaultdict(list)
    found: dict[Category, Intervals] = defaultdict(list)
    for span in spans:
        if span.category is Category.CONTEXT or span.details.get("deferred"):
            continue
        category = Category.WAIT if span.category is Category.PASS else span.category
        for part in span.parts or [Part(category, span.began, span.ended)]:
            piece = part.began, part.ended
            if part.category is Category.COMPUTE:
                work[span.thread].append(piece)
            else:
                found[part.category].append(piece)
                interruptions[span.thread].append(piece)
    computed = [subtract(union(pieces), union(interruptions[thread])) for thread, pieces in work.items()]
    computing = [piece for pieces in computed for piece in pieces]
    states = [computing, found[Category.SERIALISE], found[Category.TRANSFER], found[Category.WAIT]]
    known: Intervals = []
    lengths = []
    for intervals in states:
        fresh = subtract(union(intervals), known)
        lengths.append(sum(max(0.0, min(end, ended) - max(start, began)) for start, end in fresh))
        known = union([*known, *fresh])
    return lengths


def union(intervals: Intervals) -> Intervals:
    """Return the same times as intervals that are sorted and apart.

    >>> union([(3, 5), (0, 1), (4, 6)])
    [(0, 1), (3, 6)]
    """
    merged: Intervals = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((start, end))
    return merged


def subtract(intervals: Intervals, others: Intervals) -> Intervals:
    """Return the times of `intervals` without those of `others`. Both are sorted and apart.

    >>> subtract([(0, 10)], [(2, 3), (5, 20)])
    [(0, 2), (3, 5)]
    """
    left: Intervals = []
    index = 0
    for start, end in intervals:
        while index < len(others) and others[index][1] <= start:
            index += 1
        at = index
        while at < len(others) and others[at][0] < end:
            if others[at][0] > start:
                left.append((start, others[at][0]))
            start = max(start, others[at][1])
            at += 1
        if start < end:
            left.append((start, end))
    return left
