"""What the page shows of one moment: workers, calls and passes of a view, in the form in which they are drawn.

Everything is bounded, whatever the group does. Times are on the observer's clock. Identifiers are strings, see `spans`.
"""

from __future__ import annotations

from typing import Any

import msgspec

from telegrad.observe.dashboard.history import Rates
from telegrad.observe.dashboard.spans import identifier
from telegrad.observe.model import CallKey, GroupView, LiveCall, WorkerView
from telegrad.observe.rates import live_calls, without_collectives

MOST_CALLS = 300
MOST_PASSES = 50


class WorkerRow(msgspec.Struct, frozen=True):
    """One worker, or what is known of one that does not answer."""

    name: str
    state: str
    """"alive" if it answered; else what other workers think of it, or "silent"."""
    reason: str = ""
    """Why it did not answer."""
    id: int = -1
    incarnation: str = ""
    generation: int = 0
    host: str = ""
    pid: int = 0
    addresses: tuple[str, ...] = ()
    connections: dict[str, str] = {}
    up: float = 0.0
    """Seconds since it started."""
    rates: Rates = Rates()
    calls_made: int = 0
    calls_served: int = 0
    calls_failed: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    memory: int = 0
    shared_memory: int = 0
    threads: int = 0
    descriptors: int = 0
    passes_run: int = 0
    optimizer_steps: int = 0
    references_owned: int = 0
    references_held: int = 0
    contexts: int = 0
    live_calls: int = 0
    offset: float = 0.0
    offset_error: float = 0.0
    dropped: int = 0


class CallRow(msgspec.Struct, frozen=True):
    """A call that has not ended, as its caller and its callee see it."""

    caller: str
    id: str
    callee: str
    function: str
    began: float
    state: str
    """What the callee says, or the caller if the callee knows nothing of it."""
    deadline: float | None = None
    made_at: str = ""
    """File and line of the caller."""
    runs_at: str = ""
    """File and line where it is on the callee."""
    context: str = ""
    parent: tuple[str, str] | None = None
    cancelled: str = ""


class PassPart(msgspec.Struct, frozen=True):
    """What one worker does in a pass."""

    worker: str
    state: str
    waits_for: tuple[str, ...]
    islands_run: int
    islands_left: int
    gates: tuple[str, ...]


class PassRow(msgspec.Struct):
    """A backward pass that runs."""

    id: str
    context: str
    driver: str
    began: float
    parts: list[PassPart] = []


class Snapshot(msgspec.Struct, frozen=True):
    """The group at one moment."""

    now: float
    wall: float
    """Time of day, by the first worker that answered."""
    workers: list[WorkerRow]
    calls: list[CallRow]
    calls_in_all: int
    passes: list[PassRow]
    stuck: Any
    """See `telegrad.observe.dashboard.stuck_tree`."""


def snapshot(view: GroupView, rates: dict[str, Rates], stuck: Any = None) -> Snapshot:
    """Return what the page shows of a view."""
    calls = _calls(view)
    wall = view.workers[0].wall if view.workers else 0.0
    return Snapshot(
        view.now, wall, _workers(view, rates), calls[:MOST_CALLS], len(calls), _passes(view)[:MOST_PASSES], stuck
    )


def _workers(view: GroupView, rates: dict[str, Rates]) -> list[WorkerRow]:
    rows = {worker.name: _answered(worker, view, rates.get(worker.name, Rates())) for worker in view.workers}
    states: dict[str, str] = {}
    for worker in view.workers:
        for name, state in worker.members.items():
            # One that is alive for some and lost for others is on its way to be lost.
            if states.get(name, "alive") == "alive":
                states[name] = state
    for name, reason in view.silent.items():
        state = states.get(name, "silent")
        rows.setdefault(name, WorkerRow(name, "silent" if state == "alive" else state, reason))
    for name, state in states.items():
        rows.setdefault(name, WorkerRow(name, "silent" if state == "alive" else state))
    return sorted(rows.values(), key=lambda row: (row.id < 0, row.id, row.name))


def _answered(worker: WorkerView, view: GroupView, rates: Rates) -> WorkerRow:
    return WorkerRow(
        worker.name,
        "alive",
        id=worker.id,
        incarnation=f"{worker.incarnation:x}",
        generation=worker.generation,
        host=worker.host,
        pid=worker.pid,
        addresses=worker.addresses,
        connections=worker.connections,
        up=max(0.0, worker.now - worker.started),
        rates=rates,
        calls_made=worker.calls_made,
        calls_served=worker.calls_served,
        calls_failed=worker.calls_failed,
        bytes_sent=worker.bytes_sent,
        bytes_received=worker.bytes_received,
        memory=worker.memory,
        shared_memory=worker.shared_memory,
        threads=worker.threads,
        descriptors=worker.descriptors,
        passes_run=worker.passes_run,
        optimizer_steps=worker.optimizer_steps,
        references_owned=worker.references_owned,
        references_held=worker.references_held,
        contexts=worker.contexts_alive,
        live_calls=len(live_calls(worker)),
        offset=view.offsets.get(worker.name, 0.0),
        offset_error=view.errors.get(worker.name, 0.0),
        dropped=worker.dropped,
    )


def _calls(view: GroupView) -> list[CallRow]:
    """Return all live calls, the oldest first, each once, without collectives: who only serves is always in one."""
    made: dict[CallKey, tuple[LiveCall, float]] = {}
    served: dict[CallKey, tuple[LiveCall, float]] = {}
    for worker in view.workers:
        offset = view.offsets.get(worker.name, 0.0)
        # Of a call to itself, a worker shows both ends: only the table tells which is which.
        made |= {(call.caller, call.id): (call, offset) for call in without_collectives(worker.made)}
        served |= {(call.caller, call.id): (call, offset) for call in without_collectives(worker.served)}
    rows = [_call(made.get(key), served.get(key)) for key in made.keys() | served.keys()]
    return sorted(rows, key=lambda row: (row.began, row.caller, row.id))


def _call(made: tuple[LiveCall, float] | None, served: tuple[LiveCall, float] | None) -> CallRow:
    found = made or served
    assert found is not None  # the key came from one of them
    call, offset = found
    callee = served[0] if served is not None else None
    return CallRow(
        call.caller,
        str(call.id),
        call.callee,
        call.function,
        call.began + offset,
        callee.state if callee is not None else call.state,
        None if call.deadline is None else call.deadline + offset,
        made[0].where if made is not None else "",
        callee.where if callee is not None else "",
        identifier(call.context),
        None if call.parent is None else (call.parent[0], str(call.parent[1])),
        call.cancelled or (callee.cancelled if callee is not None else ""),
    )


def _passes(view: GroupView) -> list[PassRow]:
    """Return all passes that run, each with what every worker does in it."""
    rows: dict[tuple[int, int], PassRow] = {}
    for worker in view.workers:
        offset = view.offsets.get(worker.name, 0.0)
        for run in worker.passes:
            began = run.began + offset
            row = rows.setdefault(
                (run.context, run.id), PassRow(identifier(run.id), identifier(run.context), run.driver, began)
            )
            row.began = min(row.began, began)
            row.driver = row.driver or run.driver
            row.parts.append(
                PassPart(worker.name, run.state, run.waits_for, run.islands_run, run.islands_left, run.gates)
            )
    return sorted(rows.values(), key=lambda row: (row.began, row.context, row.id))
