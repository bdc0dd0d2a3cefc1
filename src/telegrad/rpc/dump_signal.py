"""SIGUSR1 writes what is stuck to standard error, if the program has no handler for it."""

from __future__ import annotations

import logging
import os
import signal
import threading
from _thread import start_new_thread
from contextlib import suppress
from types import FrameType

from telegrad import observe
from telegrad.agent.agent import Agent
from telegrad.default_agent import acting_as

_log = logging.getLogger("telegrad")

NUMBER = signal.SIGUSR1


class DumpOnSignal:
    """The handler, while an agent lives. Does nothing outside the main thread, or if there is a handler."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._process = os.getpid()
        # No lock: changed by single operations, and by the signal handler at any point.
        self._wanted = False
        self._dumping = False
        current: object = signal.getsignal(NUMBER)
        # An agent that was closed by another thread has left its own.
        free = current is signal.SIG_DFL or (isinstance(current, DumpOnSignal) and bool(current._agent.closed))
        self._installed = threading.current_thread() is threading.main_thread() and free
        if self._installed:
            signal.signal(NUMBER, self)

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:  # a fork, which has no agent: do what would have happened without us
            signal.signal(NUMBER, signal.SIG_DFL)
            signal.raise_signal(NUMBER)
            return
        self._wanted = True
        self._start()

    def _start(self) -> None:
        if self._dumping:  # signals that arrive meanwhile are merged: it dumps once more
            return
        self._dumping = True
        try:
            # Not here: the main thread may hold locks that this needs. And not as a threading.Thread, for the same
            # reason.
            start_new_thread(self._dump, ())
        except RuntimeError as error:  # must not be raised in the program, which the signal has interrupted anywhere
            self._dumping = self._wanted = False
            with suppress(OSError):  # standard error is closed
                os.write(2, f"worker {self._agent.me.name!r} cannot write what it is doing: {error}\n".encode())

    def _dump(self) -> None:
        while self._wanted:
            self._wanted = False
            try:
                with acting_as(self._agent):
                    observe.dump()
            except Exception:  # noqa: BLE001 - nobody else would see it
                _log.exception("worker %r cannot write what it is doing", self._agent.me.name)
        self._dumping = False
        if self._wanted:  # a signal arrived at the last moment
            self._start()

    def restore(self) -> None:
        """Restore the default, unless somebody has set another handler."""
        current: object = signal.getsignal(NUMBER)
        if self._installed and current is self and threading.current_thread() is threading.main_thread():
            self._installed = False
            signal.signal(NUMBER, signal.SIG_DFL)
