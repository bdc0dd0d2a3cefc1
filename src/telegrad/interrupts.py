"""Where a signal handler may raise an exception, such as KeyboardInterrupt, in telegrad's code.

A signal can arrive between any two bytecodes: for example, after a frame was numbered and before it was sent. So
telegrad's signal handler (`telegrad.rpc.signals`) inspects the interrupted stack and defers the exception if state may
be half changed. Protection costs nothing at run time: it depends on the module of the code. Three rules:

1. Code of the modules in `_PROTECTED` is not interrupted, nor is the code that it calls.
2. A function marked `interruptible` is interrupted: it waits, or runs user code, and its callers are prepared for any
   exception. The innermost function on the stack with one of these rules decides.
3. A function marked `shielded` is not interrupted, even if it calls an interruptible function: it cleans up.

Destructors can run at any time. They are on top of the stack that they interrupt, so the rules cover them, too.
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
    "telegrad.current_waits",
    "telegrad.default_agent",
    "telegrad.events",
    "telegrad.execution.",
    "telegrad.futures",
    "telegrad.observe.",
    "telegrad.options",
    "telegrad.protocol.",
    "telegrad.rendezvous",
    "telegrad.rendezvous_epochs",
    "telegrad.rendezvous_file",
    "telegrad.rendezvous_members",
    "telegrad.rendezvous_records",
    "telegrad.rendezvous_roster",
    "telegrad.rendezvous_search",
    "telegrad.rendezvous_store",
    "telegrad.rpc.",
    "telegrad.rref.",
    "telegrad.settings",
    "telegrad.torch_private",
    "telegrad.torch_private_ownership",
    "telegrad.torch_private_profiler",
    "telegrad.transport.",
    "telegrad.waiting",
    "telegrad.waiting_report",
    "telegrad.wire.",
    "telegrad.worker_info",
)

F = TypeVar("F", bound=Callable[..., Any])

# By identity, because equal code may exist twice. Filled when modules are imported, and never changed afterwards.
_INTERRUPTIBLE: dict[int, CodeType] = {}
_SHIELDED: dict[int, CodeType] = {}


def interruptible(function: F) -> F:
    """Mark a function that may be interrupted: it waits, or runs user code, and no state is half changed."""
    code = function.__code__
    _INTERRUPTIBLE[id(code)] = code
    return function


def shielded(function: F) -> F:
    """Mark a function that is never interrupted, whatever it calls. It must not wait for long."""
    code = function.__code__
    _SHIELDED[id(code)] = code
    return function


def is_protected(frame: FrameType | None) -> bool:
    """Return whether an exception raised in `frame` now could leave state half changed."""
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
