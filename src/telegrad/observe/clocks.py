"""Puts the times of all workers on one clock, so that no message arrives before it was sent.

Clocks are compared as NTP does: a worker reads its clock some time between a request and the reply, so its offset is
known up to half the time in between. Of several rounds the shortest counts (`best`). Messages between workers tell
more, because a message cannot arrive before it is sent. Each gives a bound for the difference of two offsets, and
`align` finds offsets near the estimates that keep all bounds (difference constraints, solved by relaxation as Bellman
and Ford do).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from telegrad.observe.model import CallKey, Event, Kind

Message = tuple[str, float, str, float]
"""Sender and its time, which is not later than the sending; receiver and its time, not earlier than the arrival."""


class Sample(NamedTuple):
    """The clock of a worker, read between two readings of the observer's."""

    asked: float
    answered: float
    theirs: float

    @property
    def offset(self) -> float:
        """What to add to the worker's times to get the observer's."""
        return (self.asked + self.answered) / 2 - self.theirs

    @property
    def error(self) -> float:
        """By how much the offset may be wrong."""
        return (self.answered - self.asked) / 2


def best(samples: Sequence[Sample]) -> Sample:
    """Return the sample whose offset is known best.

    >>> best([Sample(0.0, 4.0, 101.0), Sample(10.0, 11.0, 110.5)]).offset
    -100.0
    """
    return min(samples, key=lambda sample: sample.error)


class Side(NamedTuple):
    """One event, as one worker has seen it."""

    clock: str
    """Names the clock of its times."""
    worker: str
    event: Event
    open: bool = False
    """Whether it has not ended: only its begin is known."""


def messages_of(sides: Iterable[Side]) -> list[Message]:
    """Return the messages of which both the sending and the arrival are known: requests, replies and gradients."""
    calls: dict[CallKey, Side] = {}  # by caller and number
    serves: dict[CallKey, Side] = {}
    sent: dict[tuple[str, str, int, int], Side] = {}
    arrived: list[Side] = []
    for side in sides:
        match side.event.kind:
            case Kind.CALL:
                calls[side.worker, side.event.id] = side
            case Kind.SERVE:
                serves[side.event.peer, side.event.id] = side
            case Kind.GRADIENT_SENT:
                sent[gradient(side.worker, side.event)] = side
            case Kind.GRADIENT_ARRIVED:
                arrived.append(side)
    messages: list[Message] = []
    for key, serve in serves.items():
        call = calls.get(key)
        if call is None:
            continue
        messages.append((call.clock, call.event.began, serve.clock, serve.event.began))
        if not call.open:
            # Not the end of serving, which may be noted when the reply has arrived already.
            left_at = max([serve.event.began, *serve.event.marks])
            messages.append((serve.clock, left_at, call.clock, call.event.ended))
    for side in arrived:
        start = sent.get(gradient(side.worker, side.event))
        if start is not None:
            messages.append((start.clock, start.event.began, side.clock, side.event.ended))
    return messages


def gradient(worker: str, event: Event) -> tuple[str, str, int, int]:
    """Return what a gradient has in common where it is sent and where it arrives."""
    ends = (worker, event.peer) if event.kind is Kind.GRADIENT_SENT else (event.peer, worker)
    return *ends, event.id, event.pass_id


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


_PRECISION = 1e-9  # seconds; sums of large times hardly ever agree exactly
