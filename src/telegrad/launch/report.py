"""How a forked worker tells the process that started it what became of its function.

One report per worker, through a pipe of its own: a header (kind and length), then a pickle. The length makes a report
that was cut short, because its worker was killed while writing, look different from a whole one.
"""

from __future__ import annotations

import os
import pickle
import struct
import traceback
from dataclasses import dataclass
from typing import Any

import cloudpickle

_HEADER = struct.Struct(">BQ")
_VALUE, _ERROR = 0, 1


@dataclass(frozen=True)
class Raised:
    """What a worker raised: as text, and as the exception itself where it can be pickled."""

    summary: str
    traceback: str
    pickled: bytes | None

    def rebuild(self) -> BaseException | None:
        """Return the exception, or None if it cannot be rebuilt here; the text says all that is known then."""
        if self.pickled is None:
            return None
        try:
            error = pickle.loads(self.pickled)
        except Exception:  # noqa: BLE001 - unpickling runs the exception's own code, which may raise anything
            return None
        return error if isinstance(error, BaseException) else None


def write_value(pipe: int, value: object) -> None:
    """Report that the function returned `value`."""
    _write(pipe, _VALUE, cloudpickle.dumps(value))


def write_error(pipe: int, error: BaseException) -> None:
    """Report that the function raised `error`."""
    try:
        pickled = cloudpickle.dumps(error)
    except Exception:  # noqa: BLE001 - an exception may hold anything, also what refuses to be pickled
        pickled = None
    summary = "".join(traceback.format_exception_only(error)).strip()
    text = "".join(traceback.format_exception(error))
    _write(pipe, _ERROR, pickle.dumps((summary, text, pickled)))


class Report:
    """The report of one worker, as far as it has arrived."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, piece: bytes) -> None:
        """Take the next piece."""
        self._bytes += piece

    def close(self) -> None:
        """Nothing more will come: a report is judged by its length, so there is nothing to do."""

    def complete(self) -> bool:
        """Return whether the whole report has arrived."""
        if len(self._bytes) < _HEADER.size:
            return False
        _, length = _HEADER.unpack_from(self._bytes)
        return len(self._bytes) == _HEADER.size + int(length)

    def is_error(self) -> bool:
        """Return whether the worker reported, in full, that its function raised."""
        return self.complete() and int(self._bytes[0]) == _ERROR

    def value(self) -> Any:
        """Return what the function returned."""
        return pickle.loads(memoryview(self._bytes)[_HEADER.size :])

    def raised(self) -> Raised:
        """Return what the function raised."""
        return Raised(*pickle.loads(memoryview(self._bytes)[_HEADER.size :]))


def _write(pipe: int, kind: int, body: bytes) -> None:
    for part in (_HEADER.pack(kind, len(body)), body):
        rest = memoryview(part)
        while rest:
            rest = rest[os.write(pipe, rest) :]
