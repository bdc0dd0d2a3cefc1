"""The events of all workers on the observer's clock, for the timeline: those of the last seconds.

Identifiers are strings, because those of contexts and messages have 64 bits, and numbers in a browser have 53.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping

import msgspec

from telegrad.calls.service_names import GATHER
from telegrad.observe.call_names import call_name, names_of_callees
from telegrad.observe.model import CallKey, Event, GroupView, Kind

SECONDS = 60.0
MOST = 20_000
MOST_AT_ONCE = 4_000
"""Spans that one update carries. Of more than that, the longest are kept: short ones could not be seen anyway."""

_DRAWN = frozenset(
    {
        Kind.CALL,
        Kind.SERVE,
        Kind.PASS,
        Kind.ISLAND,
        Kind.GATE,
        Kind.PROBE,
        Kind.STEP,
        Kind.COLLECTIVE,
        Kind.GRADIENT_SENT,
        Kind.GRADIENT_ARRIVED,
    }
)


class Span(msgspec.Struct, frozen=True, omit_defaults=True):
    """Something that a worker did, from when to when."""

    worker: str
    kind: str
    began: float
    ended: float
    id: str = ""
    peer: str = ""
    what: str = ""
    context: str = ""
    pass_id: str = ""
    parent: tuple[str, str] | None = None
    outcome: str = ""
    size: int = 0
    received: int = 0
    thread: int = 0
    marks: tuple[float, ...] = ()


class Spans:
    """The spans of the last `SECONDS`, at most `MOST`."""

    def __init__(self) -> None:
        self.kept: deque[Span] = deque(maxlen=MOST)
        self._names: dict[CallKey, str] = {}  # functions that were served before the last look, by call
        self.left_out = 0
        """Spans that were too many for one update."""

    def add(self, view: GroupView) -> list[Span]:
        """Take the events of a view, and return their spans."""
        names = names_of_callees(view.workers)
        new = list(_spans_of(view, {**self._names, **names}))
        self._names = names
        if len(new) > MOST_AT_ONCE:
            self.left_out += len(new) - MOST_AT_ONCE
            new = sorted(new, key=lambda span: span.began - span.ended)[:MOST_AT_ONCE]
        new.sort(key=lambda span: span.ended)
        self.kept.extend(new)
        while self.kept and self.kept[0].ended < view.now - SECONDS:
            self.kept.popleft()
        return new


def _spans_of(view: GroupView, names: Mapping[CallKey, str]) -> Iterator[Span]:
    for worker in view.workers:
        offset = view.offsets.get(worker.name, 0.0)
        for event in worker.events:
            if event.kind in _DRAWN:
                name = names.get((worker.name, event.id), "") if event.kind is Kind.CALL else ""
                yield _span(worker.name, event, offset, name)


def _span(worker: str, event: Event, offset: float, name: str) -> Span:
    parent = event.parent
    return Span(
        worker,
        str(Kind.COLLECTIVE if event.what == GATHER else event.kind),
        round(event.began + offset, 6),
        round(event.ended + offset, 6),
        str(event.id),
        event.peer,
        _what(event, name),
        identifier(event.context),
        identifier(event.pass_id),
        None if parent is None else (parent[0], str(parent[1])),
        event.outcome,
        event.size,
        event.received,
        event.thread,
        tuple(round(mark + offset, 6) for mark in event.marks),
    )


def _what(event: Event, name: str) -> str:
    """Return what a span is, with the name that the callee of a call knows its function by."""
    if event.kind is Kind.PASS:
        return "backward"
    return call_name(event.what, name) if event.kind in (Kind.CALL, Kind.SERVE) else event.what


def identifier(number: int) -> str:
    """Return an id as a string, empty for none.

    >>> identifier(2**60 + 1), identifier(0)
    ('1152921504606846977', '')
    """
    return str(number) if number else ""
