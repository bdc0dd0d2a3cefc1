"""A value that lives on this worker and has a name, from the moment that somebody uses the name."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable
from typing import Any

from telegrad.calls.exceptions import RemoteTraceback
from telegrad.calls.reraise import another
from telegrad.errors import CallError, RemoteError
from telegrad.protocol.rref_ids import COUNTER_BITS, RRefId
from telegrad.rref.ordered import OrderedQueue


class OwnerValue:
    """One value, or the error that it ended in, or what waits for either."""

    __slots__ = ("_lock", "_waiters", "call_error", "error", "mailbox", "ready", "value")

    def __init__(self, ordered: bool = False) -> None:
        self._lock = threading.Lock()  # protects the five below
        self._waiters: list[Callable[[], None]] = []
        self.ready = False
        self.value: Any = None
        self.error: Exception | None = None
        self.call_error: CallError | None = None
        """Why the call that was to make the value was not answered; None if the function returned, or raised."""
        self.mailbox = OrderedQueue() if ordered else None

    def set(self, value: object, error: Exception | None = None, call_error: CallError | None = None) -> None:
        """Here it is; only the first counts."""
        with self._lock:
            if self.ready and self.error is not None:
                self.call_error = call_error or self.call_error  # which is why the function was cancelled, if it was
            if self.ready:
                return
            self.value, self.error, self.call_error, self.ready = value, error, call_error, True
            waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            waiter()

    def when_ready(self, action: Callable[[], None]) -> bool:
        """Whether there is a value (or an error) now; if not, `action` is called when there is."""
        with self._lock:
            if not self.ready:
                self._waiters.append(action)
            return self.ready

    def get(self) -> Any:
        """The value; raises what the function raised that was to make it."""
        if self.error is not None:
            # Not the one that is kept: it would collect the frames of all who see it, and these hold references, among
            # them perhaps one to this very value, which would then never die.
            raise another(self.error)
        return self.value


def to_keep(error: BaseException, worker: str) -> Exception:
    """An exception as it is kept: with the text of its traceback as its cause, and without the frames."""
    text = "".join(traceback.format_exception(error))
    if isinstance(error, Exception):
        kept = another(error)
    else:  # one that ends programs must not end that of whoever uses the reference
        kept = RemoteError(f"the function that was to make the value raised {type(error).__name__}: {error}")
        kept.worker = worker
        kept.type_name, kept.remote_traceback = f"{type(error).__module__}.{type(error).__qualname__}", text
    kept.__cause__ = RemoteTraceback(worker, text)
    return kept


def show(rref: RRefId) -> str:
    """A reference, for people."""
    return f"reference {rref[0]}:{rref[1] & ((1 << COUNTER_BITS) - 1)}"
