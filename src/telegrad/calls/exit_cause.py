"""Why a worker exits, in one line for the other workers: the errors that follow there name the first cause."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterator

from telegrad.calls.exceptions import text_of
from telegrad.connection.goodbye import shortened
from telegrad.connection.members import Members
from telegrad.errors import WorkerLost
from telegrad.protocol.membership import Identity

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


class FirstCause:
    """Which other worker exited with an error first, and with which one. Forgotten when who told of it is replaced."""

    def __init__(self, members: Members) -> None:
        self._members = members
        self._heard: tuple[Identity, str] | None = None  # who has told this worker, and what

    def text(self) -> str:
        """Return who it was, and why; empty if there is none."""
        if self._heard is None:
            return ""
        teller, text = self._heard
        member = self._members.find(teller.name)
        return "" if member is not None and member.identity.incarnation != teller.incarnation else text

    def heard(self, worker: str, cause: str) -> bool:
        """Record what a worker that exits said of itself. Returns whether that is the first cause."""
        member = self._members.find(worker)
        if member is None or self.text():
            return False
        follows = cause.startswith("because ")
        text = cause.removeprefix("because ") if follows else f"worker {worker!r} ended {cause}"
        self._heard = member.identity, text
        return True


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
