"""A referenced value on the worker that owns it, possibly not computed yet."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from telegrad.calls.exceptions import RemoteTraceback, traceback_of
from telegrad.calls.reraise import another
from telegrad.errors import CallError, RemoteError
from telegrad.rref.ordered import OrderedQueue


class OwnerValue:
    """A value, the error raised instead of it, or the callbacks that wait for either."""

    __slots__ = ("_lock", "_waiters", "awaited", "call_error", "error", "queue", "ready", "value")

    def __init__(self, ordered: bool = False) -> None:
        self._lock = threading.Lock()  # protects the five below
        self._waiters: list[Callable[[], None]] = []
        self.ready = False
        self.awaited = False
        """Its creator has asked for it before the call that computes it arrived. Protected by the context's lock."""
        self.value: Any = None
        self.error: Exception | None = None
        self.call_error: CallError | None = None
        """Why the call that computes the value failed; None if the function returned or raised."""
        self.queue = OrderedQueue() if ordered else None

    def set(self, value: object, error: Exception | None = None, call_error: CallError | None = None) -> None:
        """Set the value or the error. Only the first call has an effect."""
        with self._lock:
            if self.ready and self.error is not None:
                self.call_error = call_error or self.call_error  # explains why the function was cancelled
            if self.ready:
                return
            self.value, self.error, self.call_error, self.ready = value, error, call_error, True
            waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            waiter()

    def when_ready(self, action: Callable[[], None]) -> bool:
        """Return whether the value or error is set. If not, `action` is called once it is."""
        with self._lock:
            if not self.ready:
                self._waiters.append(action)
            return self.ready

    def get(self) -> Any:
        """Return the value, or raise the exception of the function that computes it."""
        if self.error is not None:
            # Raise a copy: the stored exception would collect the frames of everyone who sees it. Those frames may
            # hold a reference to this very value, which would then never be freed.
            raise another(self.error)
        return self.value


def storable_error(error: BaseException, worker: str) -> Exception:
    """Return an exception to store: without frames, and with the text of its traceback as its cause."""
    text = traceback_of(error, error.__traceback__)
    if isinstance(error, Exception):
        stored = another(error)
    else:  # SystemExit and the like must not end the program that uses the reference
        stored = RemoteError(f"the function that computes the value raised {type(error).__name__}: {error}")
        stored.worker = worker
        stored.type_name, stored.remote_traceback = f"{type(error).__module__}.{type(error).__qualname__}", text
    stored.__cause__ = RemoteTraceback(worker, text).followed_by(stored)
    return stored
