"""Closes the agent when the interpreter exits: after all that the program itself does then.

Python first calls what was registered with `threading`, then waits for threads that are no daemons, then calls what was
registered with `atexit`, the last first. A program may have registered a shutdown there, at any time, and must find a
working agent. On the other hand a thread that waits in a call would keep the interpreter from exiting. So:

1. Before threads are waited for, note which error ends the process, if one does. From then on, a thread that waits in
   telegrad for longer than a moment has the agent closed, which wakes it.
2. When all threads have ended, run what the program registered, and then close the agent. What was registered last is
   called first, so ours is registered last, and runs the others itself.

A process that multiprocessing has forked ends after 1, without 2: there the agent is closed at once.
"""

from __future__ import annotations

import atexit
import multiprocessing
import sys
import threading
import weakref
from collections.abc import Callable
from types import FrameType

from telegrad.agent.agent import Agent
from telegrad.calls.exit_cause import error_in_flight

GRACE = 0.5
"""Seconds that a thread may wait in telegrad while the interpreter waits for it."""
_LOOK = 0.05
_OURS = (
    "telegrad.agent",
    "telegrad.autograd",
    "telegrad.backward",
    "telegrad.calls",
    "telegrad.connection",
    "telegrad.execution",
    "telegrad.futures",
    "telegrad.nn",
    "telegrad.optim",
    "telegrad.rpc",
    "telegrad.rref",
    "telegrad.waiting",
)


def close_at_exit(agent: Agent) -> None:
    """Close `agent` when the interpreter exits, unless the program does."""
    exit_ = _Exit(agent)
    try:
        # Private to CPython, but there is no other way to run before threads are waited for.
        register: Callable[[Callable[[], None]], object] = threading._register_atexit  # type: ignore[attr-defined]
    except AttributeError:
        atexit.register(exit_.after_threads)
        return
    register(exit_.before_threads)
    if multiprocessing.parent_process() is not None:
        # Multiprocessing handles the error that ends its process before it calls the interpreter's exit functions.
        from multiprocessing.util import Finalize

        Finalize(None, exit_.note_error, exitpriority=1000)


class _Exit:
    """The end of the interpreter, for one agent."""

    def __init__(self, agent: Agent) -> None:
        self._agent = weakref.ref(agent)
        self._threads_ended = False
        self._closing: threading.Event | None = None
        self._waits_since: dict[int, float] = {}

    def note_error(self) -> None:
        """The error that ends this process is what the others are told, if it can be known."""
        agent = self._agent()
        if agent is None or agent.closed:
            return
        error = error_in_flight()
        if error is None and not hasattr(sys, "ps1") and not sys.flags.interactive:
            error = getattr(sys, "last_value", None)  # set by the interpreter for an exception that nothing caught
        agent.shutdown_protocol.note_cause(error)

    def before_threads(self) -> None:
        """The interpreter is about to wait for threads."""
        agent = self._agent()
        if agent is None or agent.closed:
            return
        self.note_error()
        if not _exit_functions_will_run():
            agent.close()
            return
        atexit.register(self.after_threads)
        self._look_later(agent)

    def _look_later(self, agent: Agent) -> None:
        agent.executor.timers.at(agent.runtime.now() + _LOOK, self._look)

    def _look(self) -> None:
        """Close the agent if a thread that the interpreter waits for waits in it."""
        agent = self._agent()
        if agent is None or agent.closed or self._threads_ended:
            return
        now = agent.runtime.now()
        self._waits_since = {thread: self._waits_since.get(thread, now) for thread in _threads_that_wait_here()}
        if all(now - since < GRACE for since in self._waits_since.values()):
            self._look_later(agent)
            return
        self._closing = threading.Event()
        agent.executor.submit(self._close)

    def _close(self) -> None:
        agent, closing = self._agent(), self._closing
        try:
            if agent is not None:
                agent.close()
        finally:
            if closing is not None:
                closing.set()

    def after_threads(self) -> None:
        """Run all other exit functions, and close the agent."""
        self._threads_ended = True
        agent = self._agent()
        atexit.unregister(self.after_threads)
        # This one waits for child processes, which may wait for this worker.
        util = sys.modules.get("multiprocessing.util")
        wait_for_children = getattr(util, "_exit_function", None)
        if wait_for_children is not None:
            atexit.unregister(wait_for_children)
        try:
            if hasattr(atexit, "_run_exitfuncs"):
                atexit._run_exitfuncs()
        finally:
            if agent is not None:
                agent.close()
                if self._closing is not None:
                    self._closing.wait(agent.settings.stop_timeout + 2 * GRACE)
            if wait_for_children is not None:
                wait_for_children()


def _exit_functions_will_run() -> bool:
    """Whether what is registered with atexit is called after this: not in a process that multiprocessing has forked."""
    frame: FrameType | None = sys._getframe()
    caller: FrameType | None = None
    while frame is not None:
        name = frame.f_globals.get("__name__")
        if name == "multiprocessing.spawn":
            return True
        if name == "threading":
            caller = frame.f_back
        frame = frame.f_back
    return caller is None


def _threads_that_wait_here() -> list[int]:
    """The threads that the interpreter waits for, and that are in code of ours."""
    frames = sys._current_frames()
    main = threading.main_thread()
    found = []
    for thread in threading.enumerate():
        if thread.daemon or thread is main or thread.ident is None:
            continue
        frame = frames.get(thread.ident)
        while frame is not None and not frame.f_globals.get("__name__", "").startswith(_OURS):
            frame = frame.f_back
        if frame is not None:
            found.append(thread.ident)
    return found
