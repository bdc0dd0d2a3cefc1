"""Signal handlers that wait until telegrad is between two messages: Ctrl-C ends a call, and never a connection.

`telegrad.interrupts` says which code is protected. A signal that comes there is kept, and a thread asks the main thread
every millisecond, with SIGURG, whether it can be delivered: most often the first time. So a handler that raises, as
Python's own for Ctrl-C does, raises in the user's code, or where telegrad waits or runs the user's code. The handlers
that are there when the agent starts are wrapped; `wrap_signal_handler` wraps one that is installed later.

Nothing is lost: the handler runs after the last signal that came. Several that come before it can run are one, as
Python itself has it while a C function runs. And nobody is locked in: a signal that comes when one has been kept for
`PATIENCE` seconds is let through, wherever it strikes; a connection that it breaks is closed, and an error says so.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import weakref
from _thread import start_new_thread
from collections.abc import Callable
from time import monotonic, sleep
from types import FrameType
from typing import Any

from telegrad.interrupts import interruptible, is_protected

Handler = Callable[[int, FrameType | None], Any]

PATIENCE = 5.0
"""Seconds after which the next signal is let through in any case."""
_PAUSE = 0.001
_UNSEEN = 50  # pauses after which a question that was not seen is asked again
_WRAPPED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGALRM)
"""Signals whose handlers often raise. Not SIGUSR1 and such: one that prints where a program hangs must run at once."""
_ASK = signal.SIGURG
"""Hardly used by anybody, and ignored where there is no handler for it."""

# Those that keep something. Changed by single operations, and by signal handlers while anything runs: so no lock.
keeping: dict[int, DeferringHandler] = {}
"""See `deliver_kept`."""


class DeferringHandler:
    """Runs `handler` for each signal, when the code that it interrupts is not protected."""

    def __init__(self, handler: Handler) -> None:
        self.handler = handler
        # As for keeping.
        self._number = 0
        self._kept = False  # a signal came and is not delivered
        self._since = 0.0  # when it came
        self._asked = False  # and the main thread has not seen it
        self._asking = False  # a thread does
        self._in_its_own_name = False  # the next signal is no new one: it asks

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self._in_its_own_name:
            self._in_its_own_name = False
            self.look(frame)
            return
        now = monotonic()
        if not self._kept:
            self._since = now
        self._number = number
        self._kept = True
        self.look(frame, let_through=now - self._since >= PATIENCE)

    def look(self, frame: FrameType | None, *, let_through: bool = False) -> None:
        """Deliver what is kept, if `frame`, which is interrupted now, is not protected."""
        self._asked = False
        if not self._kept:
            return
        if let_through or not is_protected(frame):
            self._kept = False
            self._deliver(frame)
        else:
            self._ask_soon()

    @interruptible
    def _deliver(self, frame: FrameType | None) -> None:
        self.handler(self._number, frame)

    def _ask_soon(self) -> None:
        keeping[id(self)] = self
        if not self._asking:
            self._asking = True
            try:
                start_new_thread(self._ask, ())  # not threading.Thread, which takes locks
            except RuntimeError:  # there are no threads to be had: the next signal brings this one along
                self._asking = False

    def _ask(self) -> None:
        """Ask until everything is delivered, on a thread of its own.

        Only the main thread can answer: to look at the frames of a thread that runs would crash the interpreter.
        """
        main = threading.main_thread().ident
        assert main is not None
        unseen = 0  # pauses since it was asked
        while self._kept:
            sleep(_PAUSE)
            unseen = unseen + 1 if self._asked else 0
            there: object = signal.getsignal(self._number)
            if not self._kept:  # it was delivered
                break
            if there is not self:  # then it is for the handler that took our place, if there is one
                self._kept = False
                if callable(there):
                    signal.pthread_kill(main, self._number)
            elif unseen % _UNSEEN == 0:
                self._asked = True
                self._in_its_own_name = signal.getsignal(_ASK) is not _look
                # A real signal: it ends the system call that the thread may wait in.
                signal.pthread_kill(main, self._number if self._in_its_own_name else _ASK)
        self._asking = False
        if self._kept:  # it came at the last moment
            self._ask_soon()
        else:
            keeping.pop(id(self), None)

    def forget(self) -> None:
        """Drop what is kept: in the child of a fork, which has no thread that asks."""
        self._kept = self._asked = self._asking = self._in_its_own_name = False


def _look(number: int, frame: FrameType | None) -> None:
    """The handler of SIGURG."""
    for handler in list(keeping.values()):
        handler.look(frame)


def deliver_kept() -> None:
    """Deliver what is kept, if the caller's caller is not protected.

    For functions that users call in a loop and that wait for nothing, if `keeping` is not empty: the question whether
    a signal can be delivered may come at a bad moment time and again.
    """
    if threading.current_thread() is threading.main_thread():
        _look(0, sys._getframe(2))


def wrap_signal_handler(handler: Handler) -> Handler:
    """A handler that runs `handler` as soon as telegrad is not in the middle of something that must not be broken off.

    For handlers that raise and are installed after `init_rpc`, as those of timeouts are:

    >>> import signal
    >>> def on_alarm(number, frame):
    ...     raise TimeoutError
    >>> before = signal.signal(signal.SIGALRM, wrap_signal_handler(on_alarm))
    >>> _ = signal.signal(signal.SIGALRM, before)
    """
    return handler if isinstance(handler, DeferringHandler) else DeferringHandler(handler)


class Installation:
    """The handlers that are wrapped while an agent lives. Does nothing outside of the main thread, which alone may."""

    def __init__(self) -> None:
        self._shell: Any = None
        self._ours: dict[int, DeferringHandler] = {}
        if threading.current_thread() is threading.main_thread():
            self._wrap()
            self._follow_notebook()
            _forget_in_children(self)

    def _wrap(self, *_: object) -> None:
        for number in _WRAPPED:
            handler = signal.getsignal(number)
            if callable(handler) and not isinstance(handler, DeferringHandler):
                self._ours[number] = DeferringHandler(handler)
                signal.signal(number, self._ours[number])
        if signal.getsignal(_ASK) is signal.SIG_DFL:
            signal.signal(_ASK, _look)

    def _follow_notebook(self) -> None:
        """Jupyter installs Python's own handler before each cell, and what was there before after it."""
        shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
        if shell is not None:
            shell.events.register("pre_run_cell", self._wrap)
            self._shell = shell

    def undo(self) -> None:
        """Put back what was wrapped, where nobody has put something else. Again, or in another thread, does nothing."""
        if threading.current_thread() is not threading.main_thread():
            return
        shell, self._shell = self._shell, None
        if shell is not None:
            shell.events.unregister("pre_run_cell", self._wrap)
        while self._ours:
            number, ours = self._ours.popitem()
            there: object = signal.getsignal(number)
            if there is ours:
                signal.signal(number, ours.handler)
        if signal.getsignal(_ASK) is _look:
            signal.signal(_ASK, signal.SIG_DFL)

    def in_child(self) -> None:
        """The child of a fork has no agent, and no thread that sends signals again."""
        for ours in self._ours.values():
            ours.forget()
        self.undo()


def _forget_in_children(installation: Installation) -> None:
    reference = weakref.ref(installation)

    def in_child() -> None:
        inherited = reference()
        if inherited is not None:
            inherited.in_child()

    os.register_at_fork(after_in_child=in_child)
