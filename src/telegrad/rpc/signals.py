"""Signal handlers that wait until telegrad is between two messages: Ctrl-C ends a call, and never a connection.

`telegrad.interrupts` says which code is protected. A signal that comes there is kept, and a thread sends it again every
millisecond until it is found outside: most often within one. So a handler that raises, as Python's own for Ctrl-C does,
raises in the user's code, or where telegrad waits or runs the user's code. The handlers that are there when the agent
starts are wrapped; `wrap_signal_handler` wraps one that is installed later.

Nothing is lost: what comes while another is kept is kept, too. And nobody is locked in: a signal that comes when one
has been kept for `PATIENCE` seconds is let through, wherever it strikes; a connection that it breaks is closed, with
an error that says so.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import weakref
from _thread import interrupt_main, start_new_thread
from collections.abc import Callable
from time import monotonic, sleep
from types import FrameType
from typing import Any

from telegrad.interrupts import interruptible, is_protected

Handler = Callable[[int, FrameType | None], Any]

PATIENCE = 5.0
"""Seconds after which the next signal is let through in any case."""
_PAUSE = 0.001
_UNSEEN = 50  # pauses after which one that was sent again, and not seen, is sent once more
_WRAPPED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGALRM)
"""Signals whose handlers often raise. Not SIGUSR1 and such: one that prints where a program hangs must run at once."""


class DeferringHandler:
    """Runs `handler` for each signal, when the code that it interrupts is not protected."""

    def __init__(self, handler: Handler) -> None:
        self.handler = handler
        # Changed by the main thread; _resent by the other one, too. Without a lock: signals come while any is held.
        self._kept = 0  # signals that came and are not delivered
        self._since = 0.0  # when the first of them came
        self._resent = False  # the next signal is one of those
        self._resending = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        now = monotonic()
        fresh = not self._resent
        self._resent = False
        if fresh:
            if not self._kept:
                self._since = now
            self._kept += 1
        if not self._kept:
            return  # sent again just when it was delivered
        if is_protected(frame) and not (fresh and now - self._since >= PATIENCE):
            self._resend_soon(number)
            return
        self._kept -= 1
        if self._kept:
            self._since = now
            self._resend_soon(number)
        self._deliver(number, frame)

    @interruptible
    def _deliver(self, number: int, frame: FrameType | None) -> None:
        self.handler(number, frame)

    def _resend_soon(self, number: int) -> None:
        if not self._resending:
            self._resending = True
            try:
                start_new_thread(self._resend, (number,))  # not threading.Thread, which takes locks
            except RuntimeError:  # there are no threads to be had: the next signal brings this one along
                self._resending = False

    def _resend(self, number: int) -> None:
        """Send the signal again and again until it is delivered, on a thread of its own.

        Only the handler can see whether it may be: another thread must not look at the frames of one that runs.
        """
        main = threading.main_thread().ident
        assert main is not None
        unseen = 0  # pauses since it was sent
        while self._kept:
            sleep(_PAUSE)
            unseen = unseen + 1 if self._resent else 0
            there: object = signal.getsignal(number)
            if there is not self:  # then it is for the one that took our place, if there is one
                while self._kept:
                    self._kept -= 1
                    interrupt_main(signal.Signals(number))
            elif unseen % _UNSEEN == 0 and self._kept:
                self._resent = True
                signal.pthread_kill(main, number)  # ends a system call that the thread may wait in
        self._resending = False
        if self._kept:  # it came at the last moment
            self._resend_soon(number)

    def forget(self) -> None:
        """Drop what is kept: in the child of a fork, which has no thread to send it again."""
        self._kept, self._resent, self._resending = 0, False, False


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
