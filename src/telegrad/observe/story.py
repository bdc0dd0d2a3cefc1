"""Tells what happened in a context, or to a call: who sent what to whom, in order.

A pure function of the views, with their events. Times are converted to the observer's clock, and corrected so that no
message arrives before it was sent (`telegrad.observe.clocks`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from telegrad.calls.service_names import GATHER
from telegrad.observe.call_names import BY_VALUE, call_name, names_of_callees
from telegrad.observe.clocks import Side, align, messages_of
from telegrad.observe.model import CallKey, Event, GroupView, Kind, LiveCall, WorkerView
from telegrad.observe.printable import one_line


class StoryLine(msgspec.Struct, frozen=True, order=True):
    """One thing that happened."""

    time: float
    """By the observer's clock."""
    rank: int
    """Orders what happened at the same time: causes first."""
    worker: str
    text: str
    peer: str = ""
    id: int = 0
    kind: str = ""


def story_of_context(group: GroupView, context: int) -> list[StoryLine]:
    """Return all that happened in a context, also what is still going on."""
    lines: list[StoryLine] = []
    names = names_of_callees(group.workers)
    offsets = _offsets(group)
    for view in group.workers:
        shift = offsets[view.name]
        for event in view.events:
            if event.context == context:
                lines += _of_event(view.name, event, shift, names)
        for call in (*view.made, *view.served):
            if call.context == context:
                lines.append(_of_live(view, call, shift))
        for run in view.passes:
            if run.context == context:
                text = f"takes part in backward pass {run.id:#x}, which has not ended: {run.state}"
                lines.append(StoryLine(run.began + shift, 0, view.name, text, "", run.id, Kind.PASS))
    return _in_order(lines)


def story_of_call(group: GroupView, call: CallKey) -> list[StoryLine]:
    """Return what happened to a call and to all calls that were made because of it."""
    keys, before = {call}, 0
    while len(keys) > before:
        before = len(keys)
        for view in group.workers:
            keys |= {(view.name, each.id) for each in view.events if each.kind is Kind.CALL and each.parent in keys}
            keys |= {(each.caller, each.id) for each in view.made if each.parent in keys}
    lines: list[StoryLine] = []
    names = names_of_callees(group.workers)
    offsets = _offsets(group)
    for view in group.workers:
        shift = offsets[view.name]
        for event in view.events:
            key = (view.name if event.kind is Kind.CALL else event.peer, event.id)
            if event.kind in (Kind.CALL, Kind.SERVE) and key in keys:
                lines += _of_event(view.name, event, shift, names)
        for live in (*view.made, *view.served):
            if (live.caller, live.id) in keys:
                lines.append(_of_live(view, live, shift))
    return _in_order(lines)


def latest(group: GroupView, most: int = 10) -> list[StoryLine]:
    """Return the latest contexts and calls that can be told of, the newest last."""
    names, contexts, calls = names_of_callees(group.workers), dict[int, StoryLine](), list[StoryLine]()
    offsets = _offsets(group)
    for view in group.workers:
        shift = offsets[view.name]
        ended = [(event.id, event.began, "") for event in view.events if event.kind is Kind.CONTEXT]
        for number, began, state in [*ended, *((each.id, each.began, ", which exists now") for each in view.contexts)]:
            text = f"context {number:#x}{state}"
            line = StoryLine(began + shift, 0, view.name, text, "", number, Kind.CONTEXT)
            contexts[number] = min(line, contexts.get(number, line))  # the worker that entered it first
        for event in view.events:
            if event.kind is Kind.CALL and event.parent is None and event.what != GATHER:
                what = call_name(event.what, names.get((view.name, event.id), ""))
                text = f"call {view.name}:{event.id} of {what} on {event.peer!r}"
                calls.append(StoryLine(event.began + shift, 1, view.name, text, event.peer, event.id, event.kind))
    return sorted([*sorted(contexts.values())[-most:], *sorted(calls)[-most:]])


def _in_order(lines: list[StoryLine]) -> list[StoryLine]:
    """Sort by time in microseconds, then causes first: corrected times of a sending and its arrival may be equal."""
    return sorted(msgspec.structs.replace(line, time=round(line.time, 6)) for line in lines)


def _offsets(group: GroupView) -> dict[str, float]:
    """Return what to add to the times of each worker."""
    estimates = {view.name: group.offsets.get(view.name, 0.0) for view in group.workers}
    return align(
        estimates, messages_of(Side(view.name, view.name, each) for view in group.workers for each in view.events)
    )


def _of_live(view: WorkerView, call: LiveCall, shift: float) -> StoryLine:
    function = call.function or BY_VALUE
    if call.caller == view.name and call.state in ("sent", "unsent"):
        text = f"calls {function} on {call.callee!r} (call {call.id}): {call.state}, no reply yet"
        return StoryLine(call.began + shift, 0, view.name, text, call.callee, call.id, Kind.CALL)
    text = f"got call {call.id} of {call.caller!r}, {function}: {call.state}"
    return StoryLine(call.began + shift, 1, view.name, text, call.caller, call.id, Kind.SERVE)


def _of_event(worker: str, event: Event, shift: float, names: Mapping[CallKey, str]) -> Iterable[StoryLine]:
    def line(time: float, rank: int, text: str) -> StoryLine:
        return StoryLine(time + shift, rank, worker, text, event.peer, event.id, event.kind)

    took = f"{(event.ended - event.began) * 1e3:.2f} ms"
    failed = f" with {event.outcome}" if event.outcome else ""
    caller = worker if event.kind is Kind.CALL else event.peer
    what = call_name(event.what, names.get((caller, event.id), ""))
    match event.kind:
        case Kind.CALL:
            because = f", for call {event.parent[1]} of {event.parent[0]!r}" if event.parent is not None else ""
            yield line(event.began, 0, f"calls {what} on {event.peer!r} (call {event.id}, {event.size} B){because}")
            ends = f"ends{failed} after {took}, {event.received} B"
            yield line(event.ended, 5, f"call {event.id} on {event.peer!r} {ends}")
        case Kind.SERVE:
            yield line(event.began, 1, f"gets call {event.id} of {event.peer!r}: {what}")
            if event.marks and event.marks[0]:
                yield line(event.marks[0], 2, f"runs {what} for {event.peer!r}")
            yield line(event.ended, 4, f"has replied to call {event.id} of {event.peer!r}{failed}, {event.size} B")
        case Kind.GRADIENT_SENT:
            gradients = f"the gradients of message {event.id:#x}, {event.size} B"
            yield line(event.began, 3, f"sends {gradients}, to {event.peer!r}")
        case Kind.GRADIENT_ARRIVED:
            yield line(event.began, 4, f"gets the gradients of message {event.id:#x} from {event.peer!r}")
        case Kind.CONTEXT:
            yield line(event.began, -1, f"enters context {event.id:#x}")
            yield line(event.ended, 9, f"leaves context {event.id:#x}")
        case Kind.PASS:
            yield line(event.began, 0, f"begins to take part in backward pass {event.pass_id:#x}")
            yield line(event.ended, 8, f"has done its part of backward pass {event.pass_id:#x}{failed}")
        case _:
            peer = f" ({event.peer!r})" if event.peer else ""
            yield line(event.began, 2, f"{event.kind}{' ' + event.what if event.what else ''}{peer}{failed}: {took}")


def render(lines: list[StoryLine]) -> str:
    """Return a story as text: seconds since its begin, worker, and what happened."""
    if not lines:
        return "Nothing is known of it: it never was, or its events have been dropped. `telegrad story` lists what is."
    first, width = lines[0].time, max(len(line.worker) for line in lines)
    return "\n".join(
        f"{line.time - first:12.6f}  {one_line(line.worker):{width}}  {one_line(line.text)}" for line in lines
    )
