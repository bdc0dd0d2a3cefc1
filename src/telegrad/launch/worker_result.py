"""The result of a forked worker's function, sent to the launcher through a pipe.

Each worker sends one message: a header (kind and length), then a pickle. The length distinguishes a complete message
from one that was truncated because the worker was killed while writing.
"""

from __future__ import annotations

import os
import pickle
import struct
import traceback
from dataclasses import dataclass
from typing import Any

import cloudpickle

from telegrad.calls.tracebacks import format_folded
from telegrad.errors import PayloadError

_HEADER = struct.Struct(">BQ")
_VALUE, _ERROR = 0, 1


@dataclass(frozen=True)
class RaisedException:
    """An exception that a worker raised: as text, and pickled if possible."""

    summary: str
    traceback: str
    pickled: bytes | None

    def unpickle(self) -> BaseException | None:
        """Return the exception, or None if it cannot be unpickled here. Then only its text is available."""
        if self.pickled is None:
            return None
        try:
            error = pickle.loads(self.pickled)
        except Exception:  # noqa: BLE001 - unpickling runs code of the exception's class
            return None
        return error if isinstance(error, BaseException) else None


def capture(error: BaseException) -> RaisedException:
    """Return an exception in the form in which it is sent."""
    try:
        pickled = cloudpickle.dumps(error)
    except Exception:  # noqa: BLE001 - an exception may hold objects that cannot be pickled
        pickled = None
    summary = "".join(traceback.format_exception_only(error)).strip()
    return RaisedException(summary, format_folded(error, error.__traceback__), pickled)


def write_value(pipe: int, value: object) -> None:
    """Send the value that the function returned."""
    try:
        data = cloudpickle.dumps(value)
    except Exception as error:
        kind = type(value).__name__
        raise PayloadError(
            f"what the function returned, a {kind}, cannot be pickled to send it to the launcher: {error}"
        ) from error
    _write(pipe, _VALUE, data)


def write_error(pipe: int, error: BaseException) -> None:
    """Send the exception that the function raised."""
    raised = capture(error)
    _write(pipe, _ERROR, pickle.dumps((raised.summary, raised.traceback, raised.pickled)))


class WorkerResult:
    """The result of one worker, as received so far."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, piece: bytes) -> None:
        """Add the next bytes."""
        self._bytes += piece

    def close(self) -> None:
        """Do nothing: the length in the header tells whether the result is complete."""

    def complete(self) -> bool:
        """Return whether the whole result has arrived."""
        if len(self._bytes) < _HEADER.size:
            return False
        _, length = _HEADER.unpack_from(self._bytes)
        return len(self._bytes) == _HEADER.size + int(length)

    def is_error(self) -> bool:
        """Return whether the result is complete and an exception."""
        return self.complete() and int(self._bytes[0]) == _ERROR

    def value(self) -> Any:
        """Return the value that the function returned."""
        return pickle.loads(memoryview(self._bytes)[_HEADER.size :])

    def raised(self) -> RaisedException:
        """Return the exception that the function raised."""
        return RaisedException(*pickle.loads(memoryview(self._bytes)[_HEADER.size :]))


def _write(pipe: int, kind: int, body: bytes) -> None:
    write_all(pipe, _HEADER.pack(kind, len(body)))
    write_all(pipe, body)


def write_all(pipe: int, data: bytes) -> None:
    """Write all of `data` to a pipe, which may accept only a part at a time."""
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(pipe, rest) :]
