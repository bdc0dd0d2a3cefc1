"""Adds what other workers recorded to what a profiler of this worker shows: its events, and its trace."""

from __future__ import annotations

import json
import logging
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from torch.autograd.profiler_util import FunctionEvent

from telegrad.errors import ProtocolError
from telegrad.observe.profiling.sessions import CallRecord, RemoteProfile, Session
from telegrad.torch_private_profiler import shown_name, with_tree
from telegrad.wire.profiles import ASYNC, REMOTE, Profile, ProfiledEvent, decode_profile

_log = logging.getLogger("telegrad")

REMOTE_OP = "#remote_op: "
"""Torch's text between the name of a call and that of an event on its callee."""


class PlacedEvent(NamedTuple):
    """An event of another worker, on the clock of this one."""

    name: str
    op: str
    """Its name on that worker."""
    worker: str
    start: int
    """Unix time in nanoseconds."""
    event: ProfiledEvent
    stack: list[str]


def placed_events(session: Session) -> Iterator[PlacedEvent]:
    """Yield the events that other workers recorded for a session."""
    profiles, dropped = session.profiles()
    left_out = 0
    for remote in profiles:
        try:
            profile = decode_profile(remote.data)
        except ProtocolError as error:
            _log.warning("a profile of another worker cannot be read: %s", error)
            continue
        left_out += profile.left_out
        yield from _placed(remote, profile)
    if dropped or left_out:
        _log.warning(
            "a profile is incomplete: %d events of other workers were too many for their replies, and %d replies for "
            "this worker. Profile a shorter time",
            *(left_out, dropped),
        )


def _placed(remote: RemoteProfile, profile: Profile) -> Iterator[PlacedEvent]:
    offset = remote.clock_offset
    if remote.window is not None:
        # What the callee recorded is in the middle of the call: request and reply take the same time.
        offset = (sum(remote.window) - profile.began - profile.ended) // 2
    if remote.call is not None:
        offset += remote.call.lead
    workers: dict[int, str] = {}
    for event in profile.events:
        worker = workers.get(event.worker)
        if worker is None:
            worker = workers[event.worker] = remote.name_of(event.worker)
        op = profile.names[event.name]
        own = op if event.flags & REMOTE else f"{op} @{worker}"
        name = f"{remote.prefix}{REMOTE_OP}{op}" if remote.prefix else own
        stack = [profile.names[index] for index in event.stack]
        yield PlacedEvent(name, op, worker, profile.began + event.start + offset, event, stack)


# -- events -----------------------------------------------------------------------------------------------------


def add_events(session: Session, events: list[Any], zero: int | None) -> None:
    """Add the events of other workers to those of a profiler.

    The profiler's times are relative to `zero`, in nanoseconds of Unix time. None: it does not say to what.
    """
    calls = session.calls()
    if not calls and not session.profiles()[0]:
        return
    markers = {call.marker: call for call in calls}
    marked = [(markers[event.name], event) for event in events if event.name in markers]
    if zero is None:
        # It began before the session was made, and each marker ended before it was noted. The least delay counts.
        zero = min([session.began, *(call.marked - round(event.time_range.end * 1000) for call, event in marked)])
    for call, event in marked:
        _finish_call(call, event, zero)
    if session.worker is not None:
        for event in events:
            event.node_id = session.worker
    groups: dict[tuple[int, int], list[FunctionEvent]] = defaultdict(list)
    for number, placed in enumerate(placed_events(session)):
        groups[placed.event.worker, placed.event.thread].append(_function_event(placed, number, zero))
    for group in groups.values():
        try:
            events.extend(with_tree(group))
        except RecursionError:  # in torch; of the program's own events it lets this through
            _log.warning("%d events of another worker are left out: they are nested too deeply", len(group))
    events.sort(key=lambda event: (event.time_range.start, -event.time_range.end))


def _finish_call(call: CallRecord, event: Any, zero: int) -> None:
    """Turn the marker of a call into an event that lasts as long as the call."""
    event.name = event.trace_name = call.key
    event.is_async = call.is_async
    call.begins_at(zero + round(event.time_range.start * 1000))
    if call.received:
        event.time_range.end = (call.received + call.lead - zero) / 1000


def _function_event(placed: PlacedEvent, number: int, zero: int) -> FunctionEvent:
    event = placed.event
    start = (placed.start - zero) / 1000
    return FunctionEvent(  # type: ignore[no-untyped-call]  # torch has no types here
        id=number,
        node_id=event.worker,
        name=shown_name(name=placed.name, with_wildcard=True),
        trace_name=shown_name(name=placed.name, with_wildcard=False),
        thread=event.thread,
        start_us=start,
        end_us=start + event.duration / 1000,
        fwd_thread=event.forward_thread,
        input_shapes=event.shapes,
        stack=placed.stack,
        scope=event.scope,
        cpu_memory_usage=event.cpu_memory,
        device_memory_usage=event.device_memory,
        is_async=bool(event.flags & ASYNC),
        is_remote=True,
        sequence_nr=event.sequence,
        flops=event.flops,
        is_legacy=True,
    )


# -- traces -----------------------------------------------------------------------------------------------------

_FIRST_PROCESS = 1 << 40
"""Number of the first process of another worker in a trace: larger than those of the operating system."""


def add_to_trace(session: Session, path: str) -> None:
    """Add the events of other workers to a trace file that torch has written."""
    calls = {call.marker: call for call in session.calls()}
    if not calls and not session.profiles()[0]:
        return
    with open(path, encoding="utf-8") as file:
        try:
            trace = json.load(file)
        except ValueError as error:  # torch does not escape every name
            _log.warning("the trace %s has no events of other workers, because it is not valid JSON: %s", path, error)
            return
    base = int(trace.get("baseTimeNanoseconds", 0))
    shown = trace["traceEvents"]
    more: list[dict[str, Any]] = []
    for event in shown:
        call = calls.get(event.get("name", ""))
        if call is not None and event.get("ph") == "X":
            _finish_in_trace(event, call, base, more)
    shown += more
    shown += trace_events(placed_events(session), base)
    with open(path, "w", encoding="utf-8") as file:
        json.dump(trace, file)


def _finish_in_trace(event: dict[str, Any], call: CallRecord, base: int, more: list[dict[str, Any]]) -> None:
    event["name"] = call.key
    if not call.received:
        return
    call.begins_at(base + round(event["ts"] * 1000))
    ended = (call.received + call.lead - base) / 1000
    if not call.is_async:
        event["dur"] = ended - event["ts"]
    else:  # it may overlap other events of its thread
        for phase, at in (("b", event["ts"]), ("e", ended)):
            more.append(
                {"ph": phase, "cat": "rpc", "name": call.key, "id": call.marker, "ts": at}
                | {"pid": event["pid"], "tid": event["tid"]}
            )


def trace_events(placed: Iterable[PlacedEvent], base: int) -> list[dict[str, Any]]:
    """Return events as a trace has them: each worker is a process, with times relative to `base`."""
    events: list[dict[str, Any]] = []
    workers: dict[int, str] = {}
    for each in placed:
        event = each.event
        workers[event.worker] = each.worker
        events.append(
            {
                "ph": "X",
                "cat": "cpu_op",
                "name": each.op.rpartition(REMOTE_OP)[2].removesuffix(f" @{each.worker}"),
                "pid": _FIRST_PROCESS + event.worker,
                "tid": event.thread,
                "ts": (each.start - base) / 1000,
                "dur": event.duration / 1000,
                "args": {"event": each.name, "worker": each.worker},
            }
        )
    for number, name in workers.items():
        named = {"name": f"worker {name!r}"}
        events.append({"ph": "M", "name": "process_name", "pid": _FIRST_PROCESS + number, "args": named})
    return events
