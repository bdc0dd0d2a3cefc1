"""What workers say of themselves in a round of a graceful shutdown, summed up on the way to the root.

A group may end when no worker has a call in flight, twice in a row, with no call made in between. Messages about
references are not calls. They are counted at both ends, by sender and receiver, and have *settled* when the counts are
equal. A sum keeps only the counts of messages to or from workers that are not part of it: the others are compared
when their two ends meet, and forgotten. So a sum stays small if workers talk to few others.

Messages to workers that are in nobody's report do not count: those are gone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import groupby

Pair = tuple[int, int]
"""Sender and receiver."""


@dataclass(frozen=True)
class Report:
    """What one or several workers say together."""

    members: frozenset[int]
    """Their ids."""
    busy: bool
    """Whether one of them has a call in flight."""
    made: int
    """How many calls and messages about references they ever made."""
    pending: bool
    """Whether one of them is about to send messages about references."""
    differs: bool = False
    """Whether a message about references from one of them to another has not arrived."""
    sent: Mapping[Pair, int] = field(default_factory=dict)
    """How many messages about references they ever sent to others."""
    received: Mapping[Pair, int] = field(default_factory=dict)
    """How many they ever received from others."""

    @property
    def settled(self) -> bool:
        """Whether all messages about references between them have arrived, and no more follow."""
        return not self.pending and not self.differs


def report_of(
    worker: int, *, busy: bool, calls: int, pending: bool, sent: Mapping[int, int], received: Mapping[int, int]
) -> Report:
    """Return what one worker says; `sent` and `received` are by worker."""
    return _summed(
        Report(
            frozenset((worker,)),
            busy,
            calls + sum(sent.values()),
            pending,
            False,
            {(worker, to): count for to, count in sent.items()},
            {(who, worker): count for who, count in received.items()},
        )
    )


def total(reports: Iterable[Report]) -> Report:
    """Return what several workers, each in one of the reports, say together."""
    members: set[int] = set()
    busy = pending = differs = False
    made = 0
    sent: dict[Pair, int] = {}
    received: dict[Pair, int] = {}
    for report in reports:
        members |= report.members
        busy, pending, differs = busy or report.busy, pending or report.pending, differs or report.differs
        made += report.made
        sent |= report.sent
        received |= report.received
    return _summed(Report(frozenset(members), busy, made, pending, differs, sent, received))


def _summed(report: Report) -> Report:
    """Compare the counts of messages inside a report, and forget them."""
    members, sent, received = report.members, report.sent, report.received
    differs = report.differs or any(
        received.get(pair, 0) != count for pair, count in sent.items() if pair[0] in members and pair[1] in members
    )
    return Report(
        members,
        report.busy,
        report.made,
        report.pending,
        differs,
        {pair: count for pair, count in sent.items() if pair[1] not in members},
        {pair: count for pair, count in received.items() if pair[0] not in members},
    )


def to_plain(report: Report) -> tuple[object, ...]:
    """Return a report as plain data. Ids are sent as ranges: those of a subtree are a few."""
    return (
        tuple(_ranges(report.members)),
        report.busy,
        report.made,
        report.pending,
        report.differs,
        tuple((*pair, count) for pair, count in report.sent.items()),
        tuple((*pair, count) for pair, count in report.received.items()),
    )


def from_plain(data: object, most: int) -> Report:
    """Return the report of a worker of a group of at most `most`. Raises ValueError or TypeError if it is none."""
    if type(data) is not tuple or len(data) != 7:
        raise ValueError("it is not a report")
    ranges, busy, made, pending, differs, sent, received = data
    members: set[int] = set()
    next_, left = 0, most
    for first, last in ranges:
        if not (type(first) is type(last) is int and next_ <= first <= last and last - first < left):
            raise ValueError("a range of workers is not valid, or there are too many")
        members.update(range(first, last + 1))
        next_, left = last + 1, left - (last - first + 1)
    if not members:
        raise ValueError("it is about no worker")
    if not (type(busy) is type(pending) is type(differs) is bool and type(made) is int and abs(made) < 2**63):
        raise ValueError("a part of it is not valid")
    return Report(frozenset(members), busy, made, pending, differs, _pairs(sent), _pairs(received))


def _pairs(counts: object) -> dict[Pair, int]:
    found = {}
    for who, to, count in counts if type(counts) is tuple else ():
        if not type(who) is type(to) is type(count) is int:
            raise ValueError("a count of messages is not valid")
        found[who, to] = count
    return found


def _ranges(members: Iterable[int]) -> Iterable[Pair]:
    for _, run in groupby(enumerate(sorted(members)), lambda item: item[1] - item[0]):
        consecutive = [member for _, member in run]
        yield consecutive[0], consecutive[-1]
