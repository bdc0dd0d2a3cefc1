"""Writes a timeline in the trace event format, which Perfetto and chrome://tracing open.

Each worker is a process, and each of its threads a track. Times are counted in ticks of an eighth of a microsecond:
the format's unit is the microsecond, and eighths are exact in binary and in decimal. So nothing that is nested here
overlaps after a reader has rounded.

Three rules of the format hold for what is written: slices of one track are nested or apart; every point of a flow is
inside a slice of its track; and the points of a flow are in the order of time.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, TextIO

import msgspec

from telegrad.observe.timeline import Category, Span, Timeline
from telegrad.observe.tracks import Interval, Row

TICKS = 8_000_000  # per second
TraceEvent = dict[str, Any]

_ORDER = ("thread", "serving", "islands", "other", "calls", "queue", "gradients", "passes", "contexts")


class _Track(msgspec.Struct, frozen=True):
    process: int
    thread: int


class _Slice(msgspec.Struct, frozen=True):
    """Where a span was placed."""

    track: _Track
    began: int
    ended: int


def write_trace(timeline: Timeline, file: TextIO) -> int:
    """Write a trace, one event per line. Returns how many slices it has."""
    slices = 0
    file.write('{"displayTimeUnit": "ms", "otherData": ')
    file.write(json.dumps(_about(timeline)))
    file.write(', "traceEvents": [')
    for number, event in enumerate(trace_events(timeline)):
        file.write(",\n" if number else "\n")
        file.write(json.dumps(event))
        slices += event["ph"] == "X"
    file.write("\n]}\n")
    return slices


def _about(timeline: Timeline) -> dict[str, Any]:
    offsets = zip(timeline.workers, timeline.offsets, strict=True)
    return {
        "producer": "telegrad trace",
        "seconds": round(timeline.ended - timeline.began, 6),
        "clock offsets": {view.name: offset for view, offset in offsets},
    }


def trace_events(timeline: Timeline) -> Iterator[TraceEvent]:
    """Yield the events of a trace."""
    return _Writer(timeline).events()


class _Writer:
    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        times = [timeline.began]
        times += [span.began for span in timeline.spans]
        times += [instant.time for instant in timeline.instants]
        times += [time for samples in timeline.samples for time, _, _ in samples]
        self._origin = min(times)
        self._next_track = len(timeline.workers) + 1  # no track has the number of a process, nor that of another track
        self._slices: dict[int, _Slice] = {}  # by id of the span

    def events(self) -> Iterator[TraceEvent]:
        rows: dict[tuple[int, str], list[Span]] = {}
        for span in self._timeline.spans:
            rows.setdefault((span.worker, span.row), []).append(span)
        yield from self._processes()
        for (worker, row), spans in sorted(rows.items(), key=lambda item: _position(item[0], item[1])):
            yield from self._row(worker, row, spans)
        yield from self._instants()
        yield from self._counters()
        yield from self._flows()

    def _tick(self, time: float) -> int:
        return round((time - self._origin) * TICKS)

    def _processes(self) -> Iterator[TraceEvent]:
        names = [view.name for view in self._timeline.workers]
        for number, view in enumerate(self._timeline.workers):
            name = view.name if names.count(view.name) == 1 else f"{view.name}, incarnation {view.incarnation:x}"
            yield _metadata("process_name", number + 1, name=name)
            yield _metadata("process_sort_index", number + 1, sort_index=number)
            yield _metadata("process_labels", number + 1, labels=f"pid {view.pid} on {view.host}")

    # -- slices -------------------------------------------------------------------------------------------------

    def _row(self, worker: int, name: str, spans: list[Span]) -> Iterator[TraceEvent]:
        """Yield the slices of one row. What a thread does is placed first, calls go where there is room."""
        row, tracks, hidden = Row(), list[_Track](), 0
        placed = [(span, self._tick(span.began), self._tick(span.ended)) for span in spans]
        placed = [(span, began, max(ended, began + 1)) for span, began, ended in placed]
        placed.sort(key=lambda item: (item[0].category is Category.CALL, item[1], -item[2]))
        for span, began, ended in placed:
            holds = span.category is not Category.CALL
            number = row.place(Interval(began, ended, holds))
            if number is None:
                hidden += 1
                continue
            if number == len(tracks):
                tracks.append(_Track(worker + 1, self._next_track))
                self._next_track += 1
                title = name if not number else f"{name} ({number + 1})"
                yield _metadata("thread_name", worker + 1, tracks[number].thread, name=title)
                yield _metadata("thread_sort_index", worker + 1, tracks[number].thread, sort_index=self._next_track)
            place = self._slices[id(span)] = _Slice(tracks[number], began, ended)
            yield _slice(place, span.name, span.category, span.details)
            for part in span.parts:
                part_began = max(began, self._tick(part.began))
                part_ended = min(ended, self._tick(part.ended))
                if part_began < part_ended:
                    row.add_part(number, Interval(part_began, part_ended, holds))
                    inner = _Slice(tracks[number], part_began, part_ended)
                    yield _slice(inner, part.category.value, part.category, {})
        if hidden:
            note = {"name": f"{hidden} more overlap with these and are not shown", "ph": "i", "s": "t"}
            yield {**note, **_place(tracks[-1], placed[0][1]), "cat": "note"}

    def _instants(self) -> Iterator[TraceEvent]:
        tracks: dict[int, _Track] = {}
        for instant in self._timeline.instants:
            track = tracks.get(instant.worker)
            if track is None:
                track = tracks[instant.worker] = _Track(instant.worker + 1, self._next_track)
                self._next_track += 1
                yield _metadata("thread_name", track.process, track.thread, name="events")
                yield _metadata("thread_sort_index", track.process, track.thread, sort_index=self._next_track)
            place = _place(track, self._tick(instant.time))
            yield {"name": instant.name, "cat": "event", "ph": "i", "s": "t", **place, "args": instant.details}

    def _counters(self) -> Iterator[TraceEvent]:
        for worker, samples in enumerate(self._timeline.samples):
            for time, memory, calls in samples:
                place = _place(_Track(worker + 1, 0), self._tick(time))
                yield {"name": "calls served", "ph": "C", **place, "args": {"calls": calls}}
                if memory:
                    yield {"name": "memory", "ph": "C", **place, "args": {"MB": round(memory / 1e6, 1)}}

    # -- flows --------------------------------------------------------------------------------------------------

    def _flows(self) -> Iterator[TraceEvent]:
        for number, arrow in enumerate(self._timeline.arrows):
            places = [self._slices.get(id(span)) for span, _ in arrow.points]
            slices = [place for place in places if place is not None]
            if len(slices) < len(places):
                continue
            times = _in_order(slices, [self._tick(time) for _, time in arrow.points])
            for index, (place, time) in enumerate(zip(slices, times, strict=False)):
                kind = "s" if not index else "t" if index < len(slices) - 1 else "f"
                event = {"name": arrow.name, "cat": "flow", "ph": kind, "id": number + 1, **_place(place.track, time)}
                yield {**event, "bp": "e"} if kind == "f" else event


def _in_order(slices: list[_Slice], times: list[int]) -> list[int]:
    """Return times inside these slices that do not decrease, near the given ones; none if there are no such times."""
    latest = slices[-1].ended - 1
    for index in range(len(slices) - 1, -1, -1):
        latest = min(latest, slices[index].ended - 1)
        times[index] = min(times[index], latest)
    earliest = slices[0].began
    for index, place in enumerate(slices):
        earliest = times[index] = max(times[index], place.began, earliest)
        if earliest >= place.ended:
            return []
    return times


def _position(key: tuple[int, str], spans: list[Span]) -> tuple[int, int, float]:
    """Return where a row is among the others: worker, kind, first use."""
    worker, row = key
    kind = row.partition(" ")[0]
    return worker, _ORDER.index(kind) if kind in _ORDER else len(_ORDER), min(span.began for span in spans)


def _metadata(kind: str, process: int, thread: int = 0, **args: Any) -> TraceEvent:
    return {"name": kind, "ph": "M", "pid": process, "tid": thread, "args": args}


def _slice(place: _Slice, name: str, category: Category, details: dict[str, Any]) -> TraceEvent:
    event = {"name": name, "cat": category.value, "ph": "X", **_place(place.track, place.began)}
    event["dur"] = _microseconds(place.ended - place.began)
    if details:
        event["args"] = details
    return event


def _place(track: _Track, tick: int) -> TraceEvent:
    return {"pid": track.process, "tid": track.thread, "ts": _microseconds(tick)}


def _microseconds(ticks: int) -> float:
    whole, eighths = divmod(ticks, 8)
    return whole if not eighths else ticks / 8
