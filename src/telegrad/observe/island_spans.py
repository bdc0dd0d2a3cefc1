"""Finds the spans of the backward pass that gradients come from and go to."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable

from telegrad.observe.model import Event
from telegrad.observe.timeline import Category, Span

_NESTED = 8  # so many islands are looked at


class IslandSpans:
    """The islands, and the gates in them, of all workers."""

    def __init__(self, spans: Iterable[Span]) -> None:
        self._by_thread: dict[tuple[int, int], list[Span]] = defaultdict(list)
        self._by_pass: dict[tuple[int, str], list[Span]] = defaultdict(list)
        self._gates: dict[tuple[int, str, int], Span] = {}
        for span in sorted(spans, key=lambda span: span.began):
            run = span.details.get("pass", "")
            if span.category is Category.COMPUTE and span.name.startswith("island"):
                self._by_thread[span.worker, span.thread].append(span)
                self._by_pass[span.worker, run].append(span)
            elif span.category is Category.WAIT and span.name.startswith("gate"):
                self._gates[span.worker, run, span.details.get("message", 0)] = span

    def source(self, worker: int, event: Event, sent: float) -> Span | None:
        """Return the innermost island of the pass that ran on the thread when gradients were sent.

        Else the last one that ran there before: gradients may wait for the end of their island.
        """
        spans = self._by_thread.get((worker, event.thread), [])
        at = bisect_right(spans, sent, key=lambda span: span.began)
        before = [
            span for span in spans[max(0, at - _NESTED) : at] if span.details.get("pass") == f"{event.pass_id:#x}"
        ]
        running = [span for span in before if span.ended >= sent]
        return running[-1] if running else max(before, key=lambda span: span.ended, default=None)

    def target(self, worker: int, event: Event, arrived: float) -> Span | None:
        """Return what gradients that arrived were for: the gate that waited for them, or the next island of the pass
        on the same thread, or on any."""
        run = f"{event.pass_id:#x}"
        gate = self._gates.get((worker, run, event.id))
        if gate is not None:
            return gate
        spans = self._by_pass.get((worker, run), [])
        at = bisect_left(spans, arrived, key=lambda span: span.began)
        following = spans[at : at + _NESTED]
        same = (span for span in following if span.thread == event.thread)
        return next(same, following[0] if following else None)
