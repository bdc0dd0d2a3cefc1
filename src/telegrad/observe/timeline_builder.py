"""Builds the timeline of a group from its events.

The stages of a call appear on both sides. On the caller: *serialise*, *transfer* (the request), *wait* (while the
callee has it), *transfer* (the reply). On the callee: *wait* (queued), *compute*, *serialise*. Where the callee's side
is not known, the caller waits from the sending to the end. Arrows lead from a call to where it is served and back, and
from the island that computed a gradient to the one that it feeds.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from telegrad.calls.service_names import GATHER, PREFIX
from telegrad.observe.clocks import Side, align, gradient, messages_of
from telegrad.observe.island_spans import IslandSpans
from telegrad.observe.model import CallKey, Event, Kind, LiveCall, WorkerView
from telegrad.observe.recording import Recording
from telegrad.observe.timeline import Arrow, Category, Instant, Part, Span, Timeline


class _Side(msgspec.Struct, eq=False):
    """One side of a call: where it was made, or where it is served."""

    worker: int
    event: Event
    open: bool = False
    state: str = ""


def build_timeline(recording: Recording) -> Timeline:
    """Build the timeline of a recording."""
    return _Builder(recording).build()


class _Builder:
    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._recorded = list(recording.workers.values())
        self._calls: dict[CallKey, _Side] = {}  # by caller and number
        self._serves: dict[CallKey, _Side] = {}
        self._others: list[_Side] = []
        self._collect()
        self._offsets = self._align()
        self._spans: list[Span] = []
        self._instants: list[Instant] = []
        self._arrows: list[Arrow] = []

    def build(self) -> Timeline:
        for key, call in self._calls.items():
            self._add_call(call, self._serves.get(key))
        for key, serve in self._serves.items():
            if key not in self._calls:
                self._add_serve(serve)
        for other in self._others:
            self._add_other(other)
        self._add_gradients()
        began, ended = self._recording.began, self._recording.ended
        if began is None:
            began = min((span.began for span in self._spans), default=ended)
        for span in self._spans:
            _clip(span, began)
        return Timeline(
            began,
            max([ended, *(span.ended for span in self._spans)]),
            [recorded.view for recorded in self._recorded],
            self._offsets,
            self._spans,
            self._instants,
            self._arrows,
            [
                [(time + offset, memory, calls) for time, memory, calls in recorded.samples]
                for recorded, offset in zip(self._recorded, self._offsets, strict=True)
            ],
        )

    # -- collect ------------------------------------------------------------------------------------------------

    def _collect(self) -> None:
        for worker, recorded in enumerate(self._recorded):
            view = recorded.view
            for event in recorded.events:
                self._put(_Side(worker, event), view.name)
            for side in _open(worker, view):
                self._put(side, view.name)

    def _put(self, side: _Side, name: str) -> None:
        event = side.event
        if event.kind is Kind.CALL:
            table, key = self._calls, (name, event.id)
        elif event.kind is Kind.SERVE:
            table, key = self._serves, (event.peer, event.id)
        else:
            self._others.append(side)
            return
        if not (side.open and key in table):  # it ended between two answers
            table[key] = side

    def _align(self) -> list[float]:
        keys = [str(number) for number in range(len(self._recorded))]
        sides = [*self._calls.values(), *self._serves.values(), *self._others]
        messages = messages_of(Side(keys[side.worker], self._name(side), side.event, side.open) for side in sides)
        estimates = {key: recorded.offset for key, recorded in zip(keys, self._recorded, strict=True)}
        aligned = align(estimates, messages)
        return [aligned[key] for key in keys]

    # -- calls --------------------------------------------------------------------------------------------------

    def _add_call(self, call: _Side, serve: _Side | None) -> None:
        event, offset = call.event, self._offsets[call.worker]
        began, ended = event.began + offset, event.ended + offset
        sent = _clamp(event.marks[0] + offset if event.marks else began, began, ended)
        # The callee knows which method it is, and what a function is called that was sent by value.
        named = event if serve is None or (event.what and not event.what.startswith(PREFIX)) else serve.event
        span = self._span(call, f"call {_function(named)}", Category.CALL, began, ended)
        span.details = {"callee": event.peer, "call": event.id, **span.details}
        served = self._add_serve(serve) if serve is not None else None
        if served is None or serve is None:
            span.parts = _parts((Category.SERIALISE, began, sent), (Category.WAIT, sent, ended))
            return
        arrived = _clamp(serve.event.began + self._offsets[serve.worker], sent, ended)
        replied = ended if serve.open else _clamp(served.ended, arrived, ended)
        span.parts = _parts(
            (Category.SERIALISE, began, sent),
            (Category.TRANSFER, sent, arrived),
            (Category.WAIT, arrived, replied),
            (Category.TRANSFER, replied, ended),
        )
        self._arrows.append(Arrow("request", ((span, sent), (served, served.began))))
        if not call.open and not serve.open:
            self._arrows.append(Arrow("reply", ((served, served.ended), (span, ended))))

    def _add_serve(self, serve: _Side) -> Span:
        event, offset = serve.event, self._offsets[serve.worker]
        began, ended = event.began + offset, event.ended + offset
        marks = [*event.marks, *(event.ended,) * (2 - len(event.marks))] if event.marks else [event.began, event.ended]
        started = _clamp(marks[0] + offset, began, ended)
        computed = _clamp(marks[1] + offset, started, ended)
        if started > began:
            self._span(serve, f"queued {_function(event)}", Category.WAIT, began, started, row="queue")
        span = self._span(serve, f"serve {_function(event)}", Category.SERVE, started, ended)
        span.details = {"caller": event.peer, "call": event.id, **span.details}
        span.parts = _parts((Category.COMPUTE, started, computed), (Category.SERIALISE, computed, ended))
        if serve.state in ("queued", "held back", "deferred") or event.what == GATHER:  # then no thread works on it
            span.parts = _parts((Category.WAIT, started, ended))
            if serve.state == "deferred" or event.what == GATHER:  # the caller waits, and not this worker
                span.details["deferred"] = True
        return span

    # -- the rest -----------------------------------------------------------------------------------------------

    def _add_other(self, side: _Side) -> None:
        event, offset = side.event, self._offsets[side.worker]
        began, ended = event.began + offset, event.ended + offset
        if event.kind in _INSTANTS:
            name = " ".join(filter(None, (event.kind.value, event.what, event.peer)))
            self._instants.append(Instant(side.worker, name, began, _details(event)))
        elif event.kind in _NAMES:
            name, category, row = _NAMES[event.kind]
            name = f"{name} {event.context:#x}" if event.kind is Kind.PASS else f"{name} {event.what}".rstrip()
            if event.kind is Kind.CONTEXT:
                name = f"context {event.id:#x}"
            span = self._span(side, name, category, began, ended, row=row)
            if event.peer:
                span.details = {"peer": event.peer, **span.details}

    def _add_gradients(self) -> None:
        """Show gradients on their way, and lead arrows through them, from island to island."""
        names = {recorded.view.name: number for number, recorded in enumerate(self._recorded)}
        islands = IslandSpans(self._spans)
        left: dict[tuple[str, str, int, int], _Side] = {}
        for side in self._others:
            if side.event.kind is Kind.GRADIENT_SENT:
                left[self._gradient(side)] = side
        for side in self._others:
            event = side.event
            if event.kind is not Kind.GRADIENT_ARRIVED:
                continue
            arrived = event.ended + self._offsets[side.worker]
            start = left.pop(self._gradient(side), None)
            left_at = arrived if start is None else min(arrived, start.event.ended + self._offsets[start.worker])
            name = f"gradient from {event.peer}"
            way = self._span(side, name, Category.TRANSFER, left_at, arrived, row="gradients", thread=0)
            points: list[tuple[Span, float]] = [(way, arrived)]
            if start is not None:
                sent = start.event.began + self._offsets[start.worker]
                source = islands.source(start.worker, start.event, sent)
                if source is not None:
                    points.insert(0, (source, min(sent, arrived)))
            target = islands.target(side.worker, event, arrived)
            if target is not None:
                points.append((target, max(arrived, target.began)))
            if len(points) > 1:
                self._arrows.append(Arrow("gradient", tuple(points)))
        for (_, peer, _, _), side in left.items():
            if peer not in names:
                continue
            time = side.event.began + self._offsets[side.worker]
            self._instants.append(Instant(side.worker, f"gradient to {peer}", time, _details(side.event)))

    def _gradient(self, side: _Side) -> tuple[str, str, int, int]:
        return gradient(self._name(side), side.event)

    def _name(self, side: _Side) -> str:
        return self._recorded[side.worker].view.name

    def _span(
        self,
        side: _Side,
        name: str,
        category: Category,
        began: float,
        ended: float,
        *,
        row: str = "",
        thread: int | None = None,
    ) -> Span:
        event = side.event
        thread = event.thread if thread is None else thread
        row = row or (f"thread {thread}" if thread else _ROWS.get(event.kind, "other"))
        details = _details(event)
        if side.state:
            details["state"] = side.state
        if side.open:
            name, details["open"] = f"{name} (open)", True
        if row in _THREADLESS:
            thread = 0
        span = Span(side.worker, row, name, category, began, max(began, ended), thread, details, [], side.open)
        self._spans.append(span)
        return span


_ROWS = {Kind.CALL: "calls", Kind.SERVE: "serving", Kind.ISLAND: "islands"}
_THREADLESS = {"queue", "passes", "contexts", "gradients"}
_INSTANTS = {Kind.REFERENCE, Kind.CONNECTION, Kind.MEMBER}
_NAMES = {
    Kind.PASS: ("backward pass in", Category.PASS, "passes"),
    Kind.ISLAND: ("island", Category.COMPUTE, ""),
    Kind.GRADIENT_SENT: ("send a gradient", Category.SERIALISE, ""),
    Kind.GATE: ("gate", Category.WAIT, ""),
    Kind.PROBE: ("probe", Category.COMPUTE, ""),
    Kind.CONTEXT: ("context", Category.CONTEXT, "contexts"),
    Kind.STEP: ("step", Category.COMPUTE, ""),
    Kind.COLLECTIVE: ("collective", Category.WAIT, ""),
}


def _open(worker: int, view: WorkerView) -> Iterator[_Side]:
    """Yield what had not ended when the worker was asked last, as events that end then."""
    for call in view.made:
        yield _Side(worker, _event(Kind.CALL, call, call.callee, view.now), True, call.state)
    for call in view.served:
        yield _Side(worker, _event(Kind.SERVE, call, call.caller, view.now), True, call.state)
    for run in view.passes:
        event = Event(-1, Kind.PASS, run.began, view.now, what=run.driver, context=run.context, pass_id=run.id)
        yield _Side(worker, event, True, run.state)
    for context in view.contexts:
        yield _Side(worker, Event(-1, Kind.CONTEXT, context.began, view.now, id=context.id), True)


def _event(kind: Kind, call: LiveCall, peer: str, now: float) -> Event:
    return Event(
        -1,
        kind,
        call.began,
        max(now, call.began),
        call.id,
        peer,
        call.function,
        call.context,
        parent=call.parent,
        thread=call.thread,
    )


def _function(event: Event) -> str:
    """Return the name of the function of a call. The program's own have no module that tells anything."""
    return event.what.removeprefix("__main__:").removeprefix(PREFIX) or "a function by value"


def _details(event: Event) -> dict[str, Any]:
    """Return what else is known of an event, for people."""
    details: dict[str, Any] = {}
    if event.context:
        details["context"] = f"{event.context:#x}"
    if event.pass_id:
        details["pass"] = f"{event.pass_id:#x}"
        if event.id:
            details["message"] = event.id
    if event.parent is not None:
        details["made by"] = f"call {event.parent[1]} of {event.parent[0]}"
    if event.outcome:
        details["failed with"] = event.outcome
    if event.size:
        details["bytes sent"] = event.size
    if event.received:
        details["bytes received"] = event.received
    return details


def _clip(span: Span, began: float) -> None:
    """Leave out what was before the recording: it would be an empty page in a viewer."""
    if span.began < began:
        span.details = {**span.details, "began earlier by": f"{began - span.began:.3f} s"}
        span.began, span.ended = began, max(began, span.ended)
        kept = [(part.category, max(part.began, began), part.ended) for part in span.parts]
        span.parts = _parts(*kept)


def _parts(*parts: tuple[Category, float, float]) -> list[Part]:
    return [Part(*part) for part in parts if part[2] > part[1]]


def _clamp(time: float, low: float, high: float) -> float:
    return min(max(time, low), high)
