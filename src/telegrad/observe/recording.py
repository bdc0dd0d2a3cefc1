"""Collects the events of a group over some time, in bounded memory.

A reader asks every worker again and again for the events since the last time, and adds each answer. Of what is not an
event, only the last state is kept: calls, passes and contexts that are still open at the end.
"""

from __future__ import annotations

import msgspec

from telegrad.observe.model import Event, EventPosition, GroupView, WorkerView

MOST_EVENTS = 200_000
"""Events of all workers together, about 100 MB."""
_MOST_SAMPLES = 20_000


class Recorded(msgspec.Struct, eq=False):
    """What was read of one worker."""

    view: WorkerView
    """The last one, without its events."""
    offset: float
    """What to add to its times to get the observer's: the best estimate."""
    error: float
    events: list[Event] = msgspec.field(default_factory=list)
    next_event: int = 0
    missed: int = 0
    """Events that the worker dropped before they were read."""
    samples: list[tuple[float, int, int]] = msgspec.field(default_factory=list)
    """The worker's time, its memory, and how many calls it serves: whenever it was asked."""


class Recording:
    """The events of a group since `began`, a time of the observer; of all time if that is None."""

    def __init__(self, began: float | None = None, limit: int = MOST_EVENTS) -> None:
        self.began = began
        self.ended = began if began is not None else 0.0
        self.workers: dict[tuple[str, int], Recorded] = {}
        """By name and incarnation: a restarted worker has another clock, and other events."""
        self.silent: dict[str, str] = {}
        """Workers that did not answer when they were last asked, and why."""
        self.left_out = 0
        """Events that came after the limit was reached."""
        self._space = limit
        self._reference: tuple[str, float] | None = None

    @property
    def full(self) -> bool:
        """Whether there is no space for more events."""
        return self._space <= 0

    def positions(self) -> dict[str, EventPosition]:
        """Return from which event on each worker is to be asked."""
        return {name: (incarnation, recorded.next_event) for (name, incarnation), recorded in self.workers.items()}

    def add(self, group: GroupView) -> None:
        """Add what a group answered. Events that are known already are ignored."""
        self.ended = max(self.ended, group.now)
        self.silent = dict(group.silent)
        shift = self._shift(group)
        for view in group.workers:
            self._add(view, group.offsets.get(view.name, 0.0) + shift, group.errors.get(view.name, 0.0))

    def _shift(self, group: GroupView) -> float:
        """Return what to add to the offsets of an answer so that they go with those of the first one.

        The observer compares its own clock with that of one worker anew for each answer, and each time a bit
        differently. That would tear the others apart.
        """
        if self._reference is None and group.errors:
            name = min(group.errors, key=lambda name: (group.errors[name], name))
            self._reference = name, group.offsets[name]
        if self._reference is None or self._reference[0] not in group.offsets:
            return 0.0
        return self._reference[1] - group.offsets[self._reference[0]]

    def _add(self, view: WorkerView, offset: float, error: float) -> None:
        recorded = self.workers.get((view.name, view.incarnation))
        if recorded is None:
            recorded = self.workers[view.name, view.incarnation] = Recorded(view, offset, error)
        elif view.dropped:  # not at the first time, when everything before is of no interest
            recorded.missed += view.dropped
        if error < recorded.error:
            recorded.offset, recorded.error = offset, error
        for event in view.events:
            if event.number < recorded.next_event:
                continue
            recorded.next_event = event.number + 1
            if self.began is not None and event.ended + offset < self.began:
                continue
            if self._space <= 0:
                self.left_out += 1
                continue
            self._space -= 1
            recorded.events.append(event)
        recorded.next_event = max(recorded.next_event, view.next_event)
        recorded.view = msgspec.structs.replace(view, events=(), stacks={})
        if len(recorded.samples) < _MOST_SAMPLES:
            recorded.samples.append((view.now, view.memory, len(view.served)))
