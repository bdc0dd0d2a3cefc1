"""Rates and levels of every worker over the last minutes, computed from successive views.

Workers report counters. A rate is the difference of two reports divided by the time between them, on the worker's own
clock. A worker that was replaced starts again: its counters are not compared with those of the one before.
"""

from __future__ import annotations

from collections import deque

import msgspec

from telegrad.observe.model import GroupView, WorkerView

SPAN = 600.0
"""Seconds that are kept."""
STEP = 2.0
"""Seconds between two kept points."""
WINDOW = 3.0
"""Seconds over which the present rates are taken."""


class Rates(msgspec.Struct, frozen=True):
    """What one worker does per second, and what it uses."""

    calls: float = 0.0
    served: float = 0.0
    failed: float = 0.0
    sent: float = 0.0
    """Bytes per second."""
    received: float = 0.0
    passes: float = 0.0
    """Those that it began: the sum over workers is that of the group."""
    cpu: float = 0.0
    """Cores that it uses."""
    memory: int = 0


class Point(msgspec.Struct, frozen=True):
    """The rates of all workers at one time."""

    at: float
    """On the observer's clock."""
    workers: dict[str, Rates]


class History:
    """The last `SPAN` seconds, one point each `STEP`, and the rates of the last `WINDOW`."""

    def __init__(self) -> None:
        self.points: deque[Point] = deque(maxlen=int(SPAN / STEP))
        self.rates: dict[str, Rates] = {}
        self._recent: deque[GroupView] = deque()
        self._kept: GroupView | None = None

    def add(self, view: GroupView) -> Point | None:
        """Take a view, and return the point that it completes, if it is time for one."""
        self._recent.append(_without_events(view))
        while len(self._recent) > 2 and self._recent[0].now < view.now - WINDOW:
            self._recent.popleft()
        self.rates = {worker.name: Rates(memory=worker.memory) for worker in view.workers}
        self.rates |= _compare(self._recent[0], view)
        if self._kept is None:
            self._kept = self._recent[-1]
            return None
        # A little less than STEP: a view that comes a moment early still counts.
        if view.now - self._kept.now < STEP * 0.9:
            return None
        point = Point(view.now, _compare(self._kept, view))
        self._kept = self._recent[-1]
        self.points.append(point)
        return point


def _without_events(view: GroupView) -> GroupView:
    """Return a view that keeps counters, and not what is large."""
    workers = tuple(
        msgspec.structs.replace(worker, events=(), contexts=(), stacks={}, made=(), served=())
        for worker in view.workers
    )
    return msgspec.structs.replace(view, workers=workers)


def _compare(before: GroupView, now: GroupView) -> dict[str, Rates]:
    """Return the rates of the workers that are in both views."""
    old = {worker.name: worker for worker in before.workers}
    pairs = ((old.get(worker.name), worker) for worker in now.workers)
    return {worker.name: rates for one, worker in pairs if (rates := _rates(one, worker)) is not None}


def _rates(before: WorkerView | None, now: WorkerView) -> Rates | None:
    """Return the rates between two views of a worker, or None if they are not of the same process."""
    if before is None or before.incarnation != now.incarnation or now.now <= before.now:
        return None
    seconds = now.now - before.now

    def rate(new: float, old: float) -> float:
        return round(max(0.0, new - old) / seconds, 3)

    return Rates(
        calls=rate(now.calls_made, before.calls_made),
        served=rate(now.calls_served, before.calls_served),
        failed=rate(now.calls_failed, before.calls_failed),
        sent=rate(now.bytes_sent, before.bytes_sent),
        received=rate(now.bytes_received, before.bytes_received),
        passes=rate(now.passes_begun, before.passes_begun),
        cpu=rate(now.cpu_seconds, before.cpu_seconds),
        memory=now.memory,
    )
