"""Runs a call on several workers at once, and reports all their failures together."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from telegrad.errors import WorkersFailed
from telegrad.futures import Future
from telegrad.rref.handle import PendingCall

StartCall = Callable[[], Future[Any] | PendingCall]


def run_on_all(what: str, calls: Iterable[tuple[str, StartCall]]) -> list[Any]:
    """Start calls, each given with its worker, wait for all of them, and return the results in the same order.

    If one call failed, its own error is raised. If several failed, a `WorkersFailed` with all their errors is raised.
    """
    started: list[tuple[str, Future[Any] | PendingCall | None]] = []
    errors: dict[str, Exception] = {}
    for worker, start in calls:
        future = None
        try:
            future = start()
        except Exception as error:  # noqa: BLE001 - raised below, together with those of other workers
            errors[worker] = error
        started.append((worker, future))
    results = []
    try:
        for worker, future in started:
            try:
                results.append(future.wait() if future is not None else None)
            except Exception as error:  # noqa: BLE001 - as above
                errors[worker] = error
                results.append(None)
    except BaseException:  # interrupted: nobody will wait for the rest
        for _, future in started:
            if future is not None:
                future.cancel()
        raise
    if errors:
        raise _combine(what, errors, len(started))
    return results


def _combine(what: str, errors: dict[str, Exception], total: int) -> Exception:
    if len(errors) == 1:
        ((worker, error),) = errors.items()
        error.add_note(f"({what}, on worker {worker!r})")
        return error
    lines = [f"  worker {worker!r}: {type(error).__name__}: {error}" for worker, error in errors.items()]
    failed = WorkersFailed(f"{what} failed on {len(errors)} of {total} workers:\n" + "\n".join(lines), errors=errors)
    failed.__cause__ = next(iter(errors.values()))
    return failed
