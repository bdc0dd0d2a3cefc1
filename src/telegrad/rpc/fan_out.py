"""Runs a call on several workers at once, and reports all their failures together."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from telegrad.calls.tracebacks import drop_frames
from telegrad.errors import WorkersFailed
from telegrad.futures import Future
from telegrad.rref.handle import PendingCall

StartCall = Callable[[], Future[Any] | PendingCall]


class CallOutcome(NamedTuple):
    """How a call on one of several workers ended."""

    worker: str
    value: Any
    error: Exception | None


def run_on_all(what: str, calls: Iterable[tuple[str, StartCall]]) -> list[Any]:
    """Start calls, each given with its worker, wait for all of them, and return the results in the same order.

    If one call failed, its own error is raised. If several failed, a `WorkersFailed` with all their errors is raised.
    """
    outcomes = collect(calls)
    errors = {outcome.worker: outcome.error for outcome in outcomes if outcome.error is not None}
    if errors:
        raise combine(what, errors, len(outcomes))
    return [outcome.value for outcome in outcomes]


def collect(calls: Iterable[tuple[str, StartCall]]) -> list[CallOutcome]:
    """Start calls, each given with its worker, and return how each ended, when all have. An interrupt cancels them."""
    started: list[tuple[str, Future[Any] | PendingCall | Exception]] = []
    outcomes = []
    try:
        for worker, start in calls:
            try:
                started.append((worker, start()))
            except Exception as error:  # noqa: BLE001 - reported together with those of other workers
                started.append((worker, error))
        for worker, future in started:
            if isinstance(future, Exception):
                outcomes.append(CallOutcome(worker, None, future))
                continue
            try:
                outcomes.append(CallOutcome(worker, future.wait(), None))
            except Exception as error:  # noqa: BLE001 - as above
                drop_frames(error)
                outcomes.append(CallOutcome(worker, None, error))
    except BaseException:  # interrupted: nobody will wait for the rest
        for _, future in started:
            if not isinstance(future, Exception):
                future.cancel()
        raise
    return outcomes


def combine(what: str, errors: dict[str, Exception], total: int) -> Exception:
    """Return one error for those of several of `total` workers."""
    if len(errors) == 1:
        ((worker, error),) = errors.items()
        error.add_note(f"({what}, on worker {worker!r})")
        return error
    lines = [f"  worker {worker!r}: {type(error).__name__}: {error}" for worker, error in errors.items()]
    failed = WorkersFailed(f"{what} failed on {len(errors)} of {total} workers:\n" + "\n".join(lines), errors=errors)
    failed.__cause__ = next(iter(errors.values()))
    return failed
