"""What a worker without a terminal says to ``breakpoint()`` and ``input()``.

Launchers set `TERMINAL_VARIABLE` to "none" for workers whose standard input is empty, and PYTHONBREAKPOINT to
`no_breakpoint`. `telegrad run --attach NAME` gives one worker the terminal.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Mapping
from typing import NoReturn, TextIO

from telegrad.errors import TelegradError

TERMINAL_VARIABLE = "TELEGRAD_TERMINAL"


def without_terminal(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of a worker without a terminal. A debugger that the user has chosen is kept.

    >>> without_terminal({"PYTHONBREAKPOINT": "0"})
    {'TELEGRAD_TERMINAL': 'none'}
    """
    found = {TERMINAL_VARIABLE: "none"}
    if not environ.get("PYTHONBREAKPOINT"):
        found["PYTHONBREAKPOINT"] = f"{__name__}.no_breakpoint"
    return found


def no_breakpoint(*args: object, **kwargs: object) -> NoReturn:
    """Raise instead of starting a debugger that could read nothing."""
    raise TelegradError(_advice("breakpoint()"))


def explain_input(environ: Mapping[str, str] = os.environ) -> None:
    """Have ``input()`` say why there is nothing to read, if a launcher started this process without a terminal."""
    if environ.get(TERMINAL_VARIABLE) == "none" and sys.stdin is not None and _is_empty(sys.stdin):
        sys.stdin = _NoTerminal(sys.stdin)


def _is_empty(stream: TextIO) -> bool:
    """Return whether a stream is the standard input that a launcher gives to workers: /dev/null, opened again or not.

    In a forked worker, multiprocessing has opened it a second time. What the program reads from is left alone.
    """
    if isinstance(stream, _NoTerminal):
        return False
    try:
        return os.path.samestat(os.fstat(stream.fileno()), os.stat(os.devnull))
    except (OSError, ValueError):  # it is closed, or is no file
        return stream is sys.__stdin__


class _NoTerminal(io.TextIOBase, TextIO):
    """The empty standard input of a worker, whose end is an error that says what to do."""

    def __init__(self, empty: TextIO) -> None:
        self._empty = empty

    def readline(self, size: int = -1, /) -> str:  # type: ignore[override]  # as above
        line = self._empty.readline(size)
        if not line:
            raise EOFError(_advice("input()"))
        return line

    def read(self, size: int | None = -1, /) -> str:
        return self._empty.read(-1 if size is None else size)

    def fileno(self) -> int:
        return self._empty.fileno()


def _advice(what: str) -> str:
    name = os.environ.get("TELEGRAD_NAME") or f"worker{os.environ.get('RANK', '')}"
    return (
        f"{what} on worker {name!r}, which has no terminal: its standard input is empty. `telegrad run --attach {name} "
        "...` gives it yours"
    )
