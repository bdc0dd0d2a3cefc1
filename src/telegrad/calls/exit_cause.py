"""Why a worker exits, in one line for the other workers: the errors that follow there name the first cause."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterator

from telegrad.calls.exceptions import text_of
from telegrad.connection.goodbye import shortened
from telegrad.errors import WorkerLost

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


def error_in_flight() -> BaseException | None:
    """Return the exception that this thread is handling; for a SystemExit, the one that led to it."""
    error = sys.exc_info()[1]
    if isinstance(error, SystemExit) and isinstance(error.__context__, Exception):
        return error.__context__
    return None if isinstance(error, SystemExit | GeneratorExit) else error


def cause_of(error: BaseException | None, first: str = "", *, place: bool = True) -> str:
    """Return what the other workers are told about a worker that exits with `error`; empty if there is none.

    `first` is why another worker exited before, if known: an error that follows from it is not worth naming.
    `place`: name the file and line where it was raised.

    >>> cause_of(ValueError("no such file")), cause_of(None)
    ('with ValueError: no such file', '')
    >>> cause_of(WorkerLost("b is lost"), "worker 'b' ended with ValueError: no such file")
    "because worker 'b' ended with ValueError: no such file"
    """
    if error is None:
        return ""
    if first and any(isinstance(each, WorkerLost) for each in _chain(error)):
        return shortened(f"because {first}")
    text = shortened(text_of(error).partition("\n")[0])
    where = _place_of(error) if place else ""
    return f"with {type(error).__name__}{': ' if text else ''}{text}{f' ({where})' if where else ''}"


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    following: BaseException | None = error
    while following is not None and id(following) not in seen:
        seen.add(id(following))
        yield following
        following = following.__cause__ or following.__context__


def _place_of(error: BaseException) -> str:
    """Return the file and line where user code raised the error, or called telegrad."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith((_PACKAGE, "<frozen")):
            return f"{os.path.basename(frame.filename)}:{frame.lineno}"
    return ""
