"""Where an exception that a signal handler raises, KeyboardInterrupt above all, may strike in telegrad's code.

It could strike between any two bytecodes: after a frame was numbered and before it was sent, say. So telegrad's signal
handler (`telegrad.rpc.signals`) looks at the stack that it interrupts, and waits if a state may be half changed. To
protect code costs nothing: what counts is where it is, and nothing is set when it is entered. Three rules:

1. Code of the packages in `_PROTECTED` is not interrupted, nor is what it calls.
2. A function marked `interruptible` is: it waits for something, or runs the user's code, and whoever calls it is
   prepared for any exception. Of a stack, the innermost function that is one or the other decides.
3. A function marked `shielded` is not interrupted even where it calls an interruptible one: it tidies up.

Destructors run in the middle of anything; they are above what they interrupt on the stack, and the rules cover them.
"""

from __future__ import annotations

from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any, TypeVar

_PROTECTED = (
    "telegrad.agent.",
    "telegrad.autograd",
    "telegrad.backward.",
    "telegrad.bootstrap",
    "telegrad.calls.",
    "telegrad.connection.",
    "telegrad.default_agent",
    "telegrad.execution.",
    "telegrad.futures",
    "telegrad.options",
    "telegrad.protocol.",
    "telegrad.rendezvous",
    "telegrad.rpc.",
    "telegrad.rref.",
    "telegrad.settings",
    "telegrad.transport.",
    "telegrad.waiting",
    "telegrad.wire.",
    "telegrad.worker_info",
)

F = TypeVar("F", bound=Callable[..., Any])

# By identity, since equal code may stand in two places. Filled when modules are imported, and never changed.
_INTERRUPTIBLE: dict[int, CodeType] = {}
_SHIELDED: dict[int, CodeType] = {}


def interruptible(function: F) -> F:
    """Mark a function that may be interrupted: it waits, or runs the user's code, and nothing is half done there."""
    code = function.__code__
    _INTERRUPTIBLE[id(code)] = code
    return function


def shielded(function: F) -> F:
    """Mark a function that is interrupted nowhere, whatever it calls. It waits for nothing that may take long."""
    code = function.__code__
    _SHIELDED[id(code)] = code
    return function


def is_protected(frame: FrameType | None) -> bool:
    """Whether an exception raised in `frame` now could leave something half done."""
    decided: bool | None = None
    while frame is not None:
        code = id(frame.f_code)
        if code in _SHIELDED:
            return True
        if decided is None:
            if code in _INTERRUPTIBLE:
                decided = False
            elif str(frame.f_globals.get("__name__", "")).startswith(_PROTECTED):
                decided = True
        frame = frame.f_back
    return bool(decided)
