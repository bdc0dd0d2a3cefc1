"""Reports a Ctrl-C that ends a program while it waits in telegrad with one line, not with telegrad's internal frames.

A worker that only serves is always in `shutdown`, so Ctrl-C printed its stack once for each worker of a group. With the
log level DEBUG, and where the program has its own `sys.excepthook`, the traceback is printed as ever.
"""

from __future__ import annotations

import logging
import sys
import traceback
from pathlib import Path
from types import TracebackType

from telegrad.rpc import signals

_log = logging.getLogger("telegrad")

_HERE = str(Path(__file__).parents[1])
_name = ""  # of the worker that this process is, or was


def install(name: str) -> None:
    """Report interrupts of worker `name` from now on, unless the program or its shell reports exceptions itself."""
    global _name
    _name = name
    if sys.excepthook is sys.__excepthook__ and not hasattr(sys, "ps1"):
        sys.excepthook = _report


def _report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    line = ""
    if kind is KeyboardInterrupt and not _log.isEnabledFor(logging.DEBUG):
        line = describe(trace, f"worker {_name!r}")
    if line:
        sys.stderr.write(f"{line}\n")
    else:
        sys.__excepthook__(kind, error, trace)


def describe(trace: TracebackType | None, who: str) -> str:
    """Return the line for an interrupt with this traceback; empty if it did not come while telegrad waited."""
    frames = [frame for frame in traceback.extract_tb(trace) if frame.filename != signals.__file__]
    first = next((number for number, frame in enumerate(frames) if frame.filename.startswith(_HERE)), 0)
    if not first:  # there is no frame of telegrad, or none of the program
        return ""
    caller = frames[first - 1]
    return f"{who} was interrupted in {frames[first].name}(), at {caller.filename}:{caller.lineno} (KeyboardInterrupt)"
