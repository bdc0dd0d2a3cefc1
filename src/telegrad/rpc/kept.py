"""A value that lives on this worker and has a name, from the moment that somebody uses the name."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

from telegrad.protocol.references import LIFE, Id
from telegrad.rpc.mailbox import Mailbox


class Kept:
    """One value, or the error that it ended in, or what waits for either."""

    __slots__ = ("_lock", "_waiters", "error", "mailbox", "ready", "value")

    def __init__(self, ordered: bool = False) -> None:
        self._lock = threading.Lock()  # protects the four below
        self._waiters: list[Callable[[], None]] = []
        self.ready = False
        self.value: Any = None
        self.error: BaseException | None = None
        self.mailbox = Mailbox() if ordered else None

    def set(self, value: object, error: BaseException | None = None) -> None:
        """Here it is; only the first counts."""
        with self._lock:
            if self.ready:
                return
            self.value, self.error, self.ready = value, error, True
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
            # The stored exception must not collect the frames of all who see it: they hold references, among them
            # perhaps one to this very value, which would then never die.
            raise _another(self.error)
        return self.value


def _another(error: BaseException) -> BaseException:
    try:
        other = copy.copy(error)
    except Exception:  # noqa: BLE001 - the user's class; then all get the same exception
        return error
    if type(other) is not type(error):
        return error
    other.__cause__ = error.__cause__
    return other.with_traceback(error.__traceback__)


def show(rref: Id) -> str:
    """A reference, for people."""
    return f"reference {rref[0]}:{rref[1] & ((1 << LIFE) - 1)}"
