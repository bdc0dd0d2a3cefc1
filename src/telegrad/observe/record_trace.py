"""Records what a group does for some time: from outside with ``telegrad trace``, or in a program."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from os import PathLike
from typing import TYPE_CHECKING

import msgspec

from telegrad.observe.model import EventPosition, GroupView, ViewRequest
from telegrad.observe.recording import MOST_EVENTS, Recording
from telegrad.observe.render_trace import render_trace
from telegrad.observe.timeline import Timeline
from telegrad.observe.timeline_builder import build_timeline
from telegrad.observe.trace import trace_events, write_trace
from telegrad.observe.trace_summary import Share, summarize, table

if TYPE_CHECKING:
    from telegrad.agent.agent import Agent

Look = Callable[[ViewRequest, Mapping[str, EventPosition], bool], GroupView]
"""Returns what can be seen of a group: what is wanted, the first event of each worker, whether to compare clocks."""

INTERVAL = 0.25
"""Seconds between two looks. A worker keeps its latest 8192 events, so it may make 30,000 calls per second."""
_FIRST = ViewRequest(events_since=0, most_events=1, contexts=False)  # what matters is the number of the next event
_NEXT = ViewRequest(events_since=0, contexts=False)
_LAST = ViewRequest(events_since=0)


class Trace:
    """A recorded trace."""

    def __init__(self, timeline: Timeline, recording: Recording) -> None:
        self.timeline = timeline
        self.recording = recording

    def shares(self) -> list[Share]:
        """Return how each worker spent its time."""
        return summarize(self.timeline)

    def summary(self) -> str:
        """Return how each worker spent its time as a table, and what is missing."""
        return "\n".join([table(self.shares()), *self.gaps()])

    def gaps(self) -> list[str]:
        """Return what is missing in the trace, in sentences."""
        found = [f"worker {name!r} did not answer: {reason}" for name, reason in self.recording.silent.items()]
        for recorded in self.recording.workers.values():
            if recorded.missed:
                found.append(
                    f"worker {recorded.view.name!r} had dropped {recorded.missed} events before they were read: "
                    "record fewer seconds, or keep more events (Options.events)"
                )
        if self.recording.left_out:
            found.append(f"{self.recording.left_out} events at the end were left out: {MOST_EVENTS} is the limit")
        return found

    def save(self, path: str | PathLike[str], title: str = "", *, merged: bool = False) -> int:
        """Write the trace: as a picture if the name ends with ``.svg``, else in the trace event format. Returns the
        number of slices in the trace. `merged` is for a picture with one row for each worker."""
        with open(path, "w", encoding="utf-8") as file:
            if str(path).endswith(".svg"):
                events = list(trace_events(self.timeline))
                file.write(render_trace(events, title=title, merged=merged))
                return sum(event["ph"] == "X" for event in events)
            return write_trace(self.timeline, file)


class EventReader:
    """Reads the events of a group again and again."""

    def __init__(self, look: Look, limit: int = MOST_EVENTS) -> None:
        self._look = look
        first = look(_FIRST, {}, True)
        self.recording = Recording(first.now, limit)
        self.recording.add(msgspec.structs.replace(first, workers=tuple(map(_without_events, first.workers))))

    def read(self) -> None:
        """Read the events since the last time."""
        self.recording.add(self._look(_NEXT, self.recording.positions(), False))

    def stop(self) -> Trace:
        """Read for the last time, also what has not ended, and return the trace."""
        self.recording.add(self._look(_LAST, self.recording.positions(), True))
        return self.trace()

    def trace(self) -> Trace:
        """Return what was read so far as a trace."""
        return Trace(build_timeline(self.recording), self.recording)


def _without_events(view: object) -> object:
    return msgspec.structs.replace(view, events=(), dropped=0)  # type: ignore[type-var]  # it is a struct


class TraceInProgram:
    """What `record_trace` returns: empty inside the block, and the trace after it."""

    def __init__(self) -> None:
        self.trace: Trace | None = None

    def shares(self) -> list[Share]:
        """Return how each worker spent its time in the block."""
        return self._finished().shares()

    def summary(self) -> str:
        """Return the same as a table."""
        return self._finished().summary()

    def save(self, path: str | PathLike[str], title: str = "", *, merged: bool = False) -> int:
        """Write the trace, as `Trace.save` does."""
        return self._finished().save(path, title, merged=merged)

    def _finished(self) -> Trace:
        if self.trace is None:
            raise RuntimeError("the trace is complete when the block of record_trace() has ended")
        return self.trace


@contextmanager
def record_trace(path: str | PathLike[str] | None = None, *, agent: Agent | None = None) -> Iterator[TraceInProgram]:
    """Record what all workers of the group do in this block, and write it to a file.

    Workers keep their latest events, 8192 by default. If one has more in the block, the summary says so; use ``telegrad
    trace`` then, which reads them meanwhile.
    """
    from telegrad.default_agent import default_agent
    from telegrad.observe.gather import gather

    member = agent if agent is not None else default_agent()

    def look(request: ViewRequest, since: Mapping[str, EventPosition], clocks: bool) -> GroupView:
        return gather(member, request, since=since, clocks=clocks)

    reader, result = EventReader(look), TraceInProgram()
    try:
        yield result
    finally:
        result.trace = reader.stop()
        if path is not None:
            result.trace.save(path)
