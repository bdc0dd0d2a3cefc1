"""Closes the agent at interpreter exit, after the program's own exit handlers.

Python first calls the functions registered with `threading`, then joins non-daemon threads, then calls the functions
registered with `atexit`, last first. The program may have registered a shutdown there, which must find a working agent.
On the other hand, a thread that waits in a call would keep the interpreter from exiting. So:

1. Before threads are joined, record the error that ends the process, if there is one. From then on, a thread that waits
   in telegrad for longer than `GRACE` makes the agent close, which wakes the thread.
2. After all threads have ended, run the program's exit handlers, then close the agent. Handlers registered last are
   called first, so ours is registered last and runs the others itself.

A process forked by multiprocessing exits after step 1 without step 2, so the agent is closed in step 1 there.
"""

from __future__ import annotations

import atexit
import logging
import multiprocessing
import sys
import threading
import weakref
from collections.abc import Callable
from types import FrameType

from telegrad.agent.agent import Agent
from telegrad.calls.exit_cause import error_in_flight

_log = logging.getLogger("telegrad")

GRACE = 0.5
"""Seconds that a thread may wait in telegrad while the interpreter joins it."""
_POLL_INTERVAL = 0.05
_OUR_MODULES = (
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
    """Close `agent` when the interpreter exits, unless the program closes it earlier."""
    hooks = _ExitHooks(agent)
    try:
        # Private to CPython, but there is no other way to run before threads are joined.
        register: Callable[[Callable[[], None]], object] = threading._register_atexit  # type: ignore[attr-defined]
    except AttributeError:
        atexit.register(hooks.after_threads)
        return
    register(hooks.before_threads)
    if multiprocessing.parent_process() is not None:
        # Multiprocessing handles the error that ends its process before it calls the interpreter's exit functions.
        from multiprocessing.util import Finalize

        Finalize(None, hooks.record_error, exitpriority=1000)


class _ExitHooks:
    """The exit handlers of one agent."""

    def __init__(self, agent: Agent) -> None:
        self._agent = weakref.ref(agent)
        self._threads_ended = False
        self._closed: threading.Event | None = None
        self._waiting_since: dict[int, float] = {}
        self._failed = False

    def record_error(self) -> None:
        """Record the error that ends this process, if it is known, to report it to the other workers."""
        agent = self._agent()
        if agent is None or agent.closed:
            return
        error = error_in_flight()
        if error is None and not hasattr(sys, "ps1") and not sys.flags.interactive:
            error = getattr(sys, "last_value", None)  # set by the interpreter for an uncaught exception
        self._failed = error is not None
        agent.shutdown_protocol.note_cause(error)

    def before_threads(self) -> None:
        """Prepare for the join of all threads."""
        agent = self._agent()
        if agent is None or agent.closed:
            return
        self.record_error()
        if not _exit_functions_will_run():
            agent.close()
            return
        atexit.register(self.after_threads)
        self._schedule_check(agent)

    def _schedule_check(self, agent: Agent) -> None:
        agent.executor.timers.at(agent.runtime.now() + _POLL_INTERVAL, self._check_threads)

    def _check_threads(self) -> None:
        """Close the agent if a thread that the interpreter joins has been waiting in it for too long."""
        agent = self._agent()
        if agent is None or agent.closed or self._threads_ended:
            return
        now = agent.runtime.now()
        self._waiting_since = {thread: self._waiting_since.get(thread, now) for thread in _threads_in_telegrad()}
        if all(now - since < GRACE for since in self._waiting_since.values()):
            self._schedule_check(agent)
            return
        self._closed = threading.Event()
        agent.executor.submit(self._close)

    def _close(self) -> None:
        agent, closed = self._agent(), self._closed
        try:
            if agent is not None:
                agent.close()
        finally:
            if closed is not None:
                closed.set()

    def after_threads(self) -> None:
        """Run all other exit handlers, then close the agent."""
        self._threads_ended = True
        agent = self._agent()
        atexit.unregister(self.after_threads)
        # Multiprocessing's handler waits for child processes, which may wait for this worker, so it must run last.
        util = sys.modules.get("multiprocessing.util")
        join_children = getattr(util, "_exit_function", None)
        if join_children is not None:
            atexit.unregister(join_children)
        try:
            if hasattr(atexit, "_run_exitfuncs"):
                atexit._run_exitfuncs()
        finally:
            if agent is not None:
                self._report_forgotten_shutdown(agent)
                agent.close()
                if self._closed is not None:
                    self._closed.wait(agent.settings.stop_timeout + 2 * GRACE)
            if join_children is not None:
                join_children()

    def _report_forgotten_shutdown(self, agent: Agent) -> None:
        """Say that the program has ended without `shutdown`, which nobody else can say of it."""
        others = [record.name for record in agent.peers.records() if record.name != agent.me.name]
        if others and not self._failed and not agent.closed and not agent.shutdown_protocol.begun:
            _log.warning(
                "worker %r ends without telegrad.shutdown(), so what the others call on it from now on fails: call "
                "shutdown() at the end of the program, where it waits until all are done",
                agent.me.name,
            )


def _exit_functions_will_run() -> bool:
    """Return whether handlers registered with atexit will run, which they do not in a process that was forked."""
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


def _threads_in_telegrad() -> list[int]:
    """Return the threads that the interpreter joins and whose stacks contain telegrad's code."""
    frames = sys._current_frames()
    main = threading.main_thread()
    found = []
    for thread in threading.enumerate():
        if thread.daemon or thread is main or thread.ident is None:
            continue
        frame = frames.get(thread.ident)
        while frame is not None and not frame.f_globals.get("__name__", "").startswith(_OUR_MODULES):
            frame = frame.f_back
        if frame is not None:
            found.append(thread.ident)
    return found
