"""Functions and globals of ``__main__`` that this worker has not defined yet.

All workers of a group usually run the same script, and one of them may be ahead: it calls a function of ``__main__``
while this worker, which has just returned from ``init_rpc``, has not reached the definition. Then the call waits until
it has, or until it is sure that it never will: the script has ended, or waits in ``shutdown``.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from telegrad.errors import FunctionNotFound
from telegrad.execution.executor import Executor
from telegrad.waiting import Runtime
from telegrad.wire.function_names import resolve_function

PATIENCE = 10.0
"""Seconds that the script gets to reach a definition."""
_PAUSE = 0.02
_SHUTDOWN = "telegrad.agent.shutdown"


def wait_for_function(
    missing: FunctionNotFound, name: str, worker: str, runtime: Runtime, executor: Executor, deadline: float | None
) -> Callable[..., Any]:
    """Return the function of ``__main__`` with this name when the script has defined it; else raise what is missing."""
    if not name.startswith("__main__:"):
        raise missing
    until = runtime.now() + PATIENCE
    if deadline is not None:
        until = min(until, deadline)
    while (place := position()) and runtime.now() < until:
        executor.wait(runtime.event(), min(until, runtime.now() + _PAUSE))
        try:
            return resolve_function(name)
        except FunctionNotFound as still:
            missing = still
    function = name.partition(":")[2]
    why = f"is at {place} and has not reached it" if place else "has ended or waits in shutdown() without one"
    raise FunctionNotFound(
        f"the script of worker {worker!r} does not define {function!r} yet: it {why}. Define functions at the top "
        "level of the script, before init_rpc() and outside of conditions on the rank",
        function=name,
    ) from missing


def explain_name(error: BaseException, worker: str) -> None:
    """Add a note to a NameError about a global of ``__main__`` that this worker has not defined yet."""
    if not isinstance(error, NameError) or not error.name:
        return
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    main = vars(sys.modules["__main__"])
    if trace is None or trace.tb_frame.f_globals is not main:
        return
    place = position()
    if place:
        error.add_note(
            f"(the script of worker {worker!r} is at {place} and has not defined {error.name!r} yet: define what calls "
            "use before init_rpc(), or call barrier() after it on every worker)"
        )


def position() -> str:
    """Return the line of ``__main__`` that is being run, as in "train.py:12"; empty if it has ended or shuts down."""
    main = vars(sys.modules["__main__"])
    frame: FrameType | None = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        if frame.f_globals.get("__name__") == _SHUTDOWN:
            return ""
        if frame.f_globals is main and frame.f_code.co_name == "<module>":
            return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
