"""Signal handlers that are deferred while telegrad's code is protected: Ctrl-C ends a call but breaks no connection.

`telegrad.interrupts` defines which code is protected. A signal that arrives there is deferred. A thread then asks the
main thread every millisecond, with SIGURG, whether the signal can be delivered, which usually succeeds the first time.
So a handler that raises, such as Python's own for Ctrl-C, raises in the user's code, or where telegrad waits or runs
the user's code. Handlers that exist when the agent starts are wrapped. `wrap_signal_handler` wraps one that is
installed later.

No signal is lost: the handler runs after the last signal. Signals that arrive before it can run are merged, as Python
does while a C function runs. And the user is never locked out: a signal that arrives when another has been deferred for
`MAX_DEFERRAL` seconds is delivered immediately, in any code. A connection that it breaks is closed with an error.
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

MAX_DEFERRAL = 5.0
"""Seconds after which the next signal is delivered in any case."""
_RETRY_INTERVAL = 0.001
_RESEND_AFTER = 50  # intervals after which a retry signal that the main thread has not handled is sent again
_SETTLE = 1.0  # seconds for a thread that only has to see that the signal was delivered
_WRAPPED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGALRM)
"""Signals whose handlers often raise. Not SIGUSR1 etc.: a handler that prints where a program hangs must not wait."""
_RETRY_SIGNAL = signal.SIGURG
"""Rarely used, and ignored by default."""

# Handlers with a deferred signal. No lock: changed by single operations, and by signal handlers at any point.
pending_handlers: dict[int, DeferredSignalHandler] = {}
"""See `deliver_pending`."""


class DeferredSignalHandler:
    """Runs `handler` for each signal once the interrupted code is not protected."""

    def __init__(self, handler: Handler) -> None:
        self.handler = handler
        # No lock, as for pending_handlers.
        self._number = 0
        self._pending = False  # a signal arrived and has not been delivered
        self._since = 0.0  # when it arrived
        self._retry_sent = False  # the main thread has not handled the retry signal yet
        self._retrying = False  # a thread is running _retry
        self._own_signal_is_retry = False  # the next signal to this handler is a retry, not a new signal

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self._own_signal_is_retry:
            self._own_signal_is_retry = False
            self.try_deliver(frame)
            return
        now = monotonic()
        if not self._pending:
            self._since = now
        self._number = number
        self._pending = True
        self.try_deliver(frame, force=now - self._since >= MAX_DEFERRAL)

    def try_deliver(self, frame: FrameType | None, *, force: bool = False) -> None:
        """Deliver the pending signal unless `frame`, the interrupted frame, is protected."""
        self._retry_sent = False
        if not self._pending:
            return
        if force or not is_protected(frame):
            self._pending = False
            self._deliver(frame)
        else:
            self._start_retrying()

    @interruptible
    def _deliver(self, frame: FrameType | None) -> None:
        self.handler(self._number, frame)

    def _start_retrying(self) -> None:
        pending_handlers[id(self)] = self
        if not self._retrying:
            self._retrying = True
            try:
                start_new_thread(self._retry, ())  # not threading.Thread, which takes locks
            except RuntimeError:  # no thread can be started: the next signal delivers this one too
                self._retrying = False

    def _retry(self) -> None:
        """Send retry signals to the main thread until the signal is delivered. Runs in its own thread.

        Only the main thread can check its frames: inspecting the frames of a running thread would crash the
        interpreter.
        """
        main = threading.main_thread().ident
        assert main is not None
        unhandled = 0  # intervals since the retry signal was sent
        while self._pending:
            sleep(_RETRY_INTERVAL)
            unhandled = unhandled + 1 if self._retry_sent else 0
            current: object = signal.getsignal(self._number)
            if not self._pending:  # it was delivered
                break
            if current is not self:  # another handler was installed, so the signal belongs to that one
                self._pending = False
                if callable(current):
                    signal.pthread_kill(main, self._number)
            elif unhandled % _RESEND_AFTER == 0:
                self._retry_sent = True
                self._own_signal_is_retry = signal.getsignal(_RETRY_SIGNAL) is not _on_retry_signal
                # A real signal also interrupts a system call in which the main thread may be waiting.
                signal.pthread_kill(main, self._number if self._own_signal_is_retry else _RETRY_SIGNAL)
        self._retrying = False
        if self._pending:  # a signal arrived at the last moment
            self._start_retrying()
        else:
            pending_handlers.pop(id(self), None)

    def settle(self) -> None:
        """Wait until the thread that retries has ended: its last signal must not reach the handler that comes next."""
        deadline = monotonic() + _SETTLE
        while self._retrying and not self._pending and monotonic() < deadline:
            sleep(_RETRY_INTERVAL)

    def discard_pending(self) -> None:
        """Discard the pending signal. For the child of a fork, which has no thread that retries."""
        self._pending = self._retry_sent = self._retrying = self._own_signal_is_retry = False


def _on_retry_signal(number: int, frame: FrameType | None) -> None:
    """Try to deliver all pending signals. The handler of SIGURG."""
    for handler in list(pending_handlers.values()):
        handler.try_deliver(frame)


def deliver_pending() -> None:
    """Deliver pending signals unless the caller's caller is protected.

    For functions that users call in a loop and that do not wait, if `pending_handlers` is not empty: every retry signal
    may arrive while they run protected code.
    """
    if threading.current_thread() is threading.main_thread():
        _on_retry_signal(0, sys._getframe(2))


def wrap_signal_handler(handler: Handler) -> Handler:
    """Return a handler that runs `handler` once telegrad is not in code that must not be interrupted.

    For handlers that raise and are installed after `init_rpc`, such as those of timeouts:

    >>> import signal
    >>> def on_alarm(number, frame):
    ...     raise TimeoutError
    >>> before = signal.signal(signal.SIGALRM, wrap_signal_handler(on_alarm))
    >>> _ = signal.signal(signal.SIGALRM, before)
    """
    return handler if isinstance(handler, DeferredSignalHandler) else DeferredSignalHandler(handler)


class WrappedHandlers:
    """The signal handlers that are wrapped while an agent lives. Does nothing outside the main thread."""

    def __init__(self) -> None:
        self._shell: Any = None
        self._wrapped: dict[int, DeferredSignalHandler] = {}
        if threading.current_thread() is threading.main_thread():
            self._wrap()
            self._wrap_in_notebook_cells()
            _all_handlers.add(self)

    def _wrap(self, *_: object) -> None:
        for number in _WRAPPED:
            handler = signal.getsignal(number)
            if callable(handler) and not isinstance(handler, DeferredSignalHandler):
                self._wrapped[number] = DeferredSignalHandler(handler)
                signal.signal(number, self._wrapped[number])
        if signal.getsignal(_RETRY_SIGNAL) is signal.SIG_DFL:
            signal.signal(_RETRY_SIGNAL, _on_retry_signal)

    def _wrap_in_notebook_cells(self) -> None:
        """Wrap again before each cell: Jupyter installs Python's own handler for the cell and restores ours after."""
        shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
        if shell is not None:
            shell.events.register("pre_run_cell", self._wrap)
            self._shell = shell

    def restore(self) -> None:
        """Restore the original handlers that nobody has replaced. Does nothing the second time or in another thread."""
        if threading.current_thread() is not threading.main_thread():
            return
        shell, self._shell = self._shell, None
        if shell is not None:
            shell.events.unregister("pre_run_cell", self._wrap)
        while self._wrapped:
            number, wrapped = self._wrapped.popitem()
            wrapped.settle()
            current: object = signal.getsignal(number)
            if current is wrapped:
                signal.signal(number, wrapped.handler)
        if signal.getsignal(_RETRY_SIGNAL) is _on_retry_signal:
            signal.signal(_RETRY_SIGNAL, signal.SIG_DFL)

    def restore_in_child(self) -> None:
        """Restore the handlers in the child of a fork, which has no agent and no thread that retries."""
        for wrapped in self._wrapped.values():
            wrapped.discard_pending()
        self.restore()


_all_handlers: weakref.WeakSet[WrappedHandlers] = weakref.WeakSet()


def _restore_in_forked_children() -> None:
    for handlers in list(_all_handlers):
        handlers.restore_in_child()


os.register_at_fork(after_in_child=_restore_in_forked_children)
