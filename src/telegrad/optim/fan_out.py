"""The same thing on several workers at once; what fails on any of them is told together."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from telegrad.errors import WorkersFailed
from telegrad.futures import Future
from telegrad.rref.handle import PendingCall

Begin = Callable[[], Future[Any] | PendingCall]


def on_all(what: str, calls: Iterable[tuple[str, Begin]]) -> list[Any]:
    """Begin these calls, each named by its worker, wait for all of them, and return the results in the same order.

    If one failed its error is raised, as it is; if several did, one that tells of all.
    """
    begun: list[tuple[str, Future[Any] | PendingCall | None]] = []
    errors: dict[str, Exception] = {}
    for worker, begin in calls:
        future = None
        try:
            future = begin()
        except Exception as error:  # noqa: BLE001 - told below, with those of the others
            errors[worker] = error
        begun.append((worker, future))
    results = []
    try:
        for worker, future in begun:
            try:
                results.append(future.wait() if future is not None else None)
            except Exception as error:  # noqa: BLE001 - as above
                errors[worker] = error
                results.append(None)
    except BaseException:  # an interrupt: nobody will ask for the rest
        for _, future in begun:
            if future is not None:
                future.cancel()
        raise
    if errors:
        raise _together(what, errors, len(begun))
    return results


def _together(what: str, errors: dict[str, Exception], asked: int) -> Exception:
    if len(errors) == 1:
        ((worker, error),) = errors.items()
        error.add_note(f"({what}, on worker {worker!r})")
        return error
    lines = [f"  worker {worker!r}: {type(error).__name__}: {error}" for worker, error in errors.items()]
    failed = WorkersFailed(f"{what} failed on {len(errors)} of {asked} workers:\n" + "\n".join(lines), errors=errors)
    failed.__cause__ = next(iter(errors.values()))
    return failed
