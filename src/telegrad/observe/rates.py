"""What the workers of a group did between two looks: a row of figures for each."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from telegrad.calls.service_names import COLLECTIVE
from telegrad.observe.model import GroupView, LiveCall, WorkerView

RESTARTS = 65536
"""A launcher gives a worker that it has started n times again a generation of at least n times this."""


class WorkerRow(msgspec.Struct, frozen=True):
    """The figures of one worker."""

    worker: str
    id: int
    incarnation: int
    generation: int
    pid: int
    host: str
    addresses: tuple[str, ...]
    up: float
    """Seconds since it started."""
    calls_made: int
    calls_served: int
    calls_failed: int
    calls_per_second: float
    """Made and served, since the look before."""
    sent: int
    received: int
    sent_per_second: float
    received_per_second: float
    memory: int
    shared_memory: int
    cpu: float
    """Cores used since the look before."""
    contexts: int
    passes: int
    """Running now."""
    passes_run: int
    references_owned: int
    references_held: int
    optimizer_steps: int
    threads: int
    in_flight: int
    """Calls made or served that have not ended, without collectives."""
    oldest: float
    """The age of the oldest of them, in seconds."""


def rows(now: GroupView, before: GroupView | None = None) -> list[WorkerRow]:
    """Return a row for each worker. Without an earlier view, rates are over the worker's life."""
    earlier = {view.incarnation: view for view in before.workers} if before is not None else {}
    return [_row(view, earlier.get(view.incarnation)) for view in now.workers]


def live_calls(view: WorkerView) -> list[LiveCall]:
    """Return the calls of a worker that have not ended, without collectives: who only serves is always in one."""
    return without_collectives((*view.made, *view.served))


def without_collectives(calls: Iterable[LiveCall]) -> list[LiveCall]:
    """Return the calls that users know as calls."""
    return [call for call in calls if call.function != COLLECTIVE]


def _row(view: WorkerView, before: WorkerView | None) -> WorkerRow:
    elapsed = max(1e-3, view.now - (before.now if before is not None else view.started))

    def rate(field: str) -> float:
        then: float = getattr(before, field) if before is not None else 0
        count: float = getattr(view, field)
        return (count - then) / elapsed

    live = live_calls(view)
    return WorkerRow(
        view.name,
        view.id,
        view.incarnation,
        view.generation,
        view.pid,
        view.host,
        view.addresses,
        view.now - view.started,
        view.calls_made,
        view.calls_served,
        view.calls_failed,
        rate("calls_made") + rate("calls_served"),
        view.bytes_sent,
        view.bytes_received,
        rate("bytes_sent"),
        rate("bytes_received"),
        view.memory,
        view.shared_memory,
        rate("cpu_seconds"),
        view.contexts_alive,
        len(view.passes),
        view.passes_run,
        view.references_owned,
        view.references_held,
        view.optimizer_steps,
        view.threads,
        len(live),
        max((view.now - call.began for call in live), default=0.0),
    )
