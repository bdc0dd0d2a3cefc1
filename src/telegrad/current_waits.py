"""What the threads of an agent wait for now, where that cannot be read from other tables.

Whoever blocks a thread enters the wait here, and leaves it afterwards. Nothing is formatted until somebody looks. Waits
for replies are not here: they are in the tables of calls.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from threading import get_ident
from typing import Any, NamedTuple


class CurrentWait(NamedTuple):
    """One wait of one thread."""

    kind: str
    """As in `telegrad.observe.model.Wait`."""
    workers: Sequence[str]
    """For whom it waits; empty if for something on this worker."""
    since: float
    text: Callable[[], str]
    thread: int
    served: Any
    """The served call that the thread waits for, if it serves one."""
    about: Any = None
    """What identifies the thing that it waits for."""


class CurrentWaits:
    """The waits of one agent. No lock: entries are added and removed by single operations.

    >>> waits = CurrentWaits(lambda: 5.0)
    >>> key = waits.enter("gate", ["b"], lambda: "a gradient")
    >>> [(wait.kind, wait.since, wait.text()) for wait in waits.all()]
    [('gate', 5.0, 'a gradient')]
    >>> waits.leave(key)
    >>> waits.all()
    []
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._keys = itertools.count()
        self._waits: dict[int, CurrentWait] = {}

    def enter(
        self, kind: str, workers: Sequence[str], text: Callable[[], str], served: Any = None, about: Any = None
    ) -> int:
        """Note that the current thread begins to wait. Returns the key for `leave`."""
        key = next(self._keys)
        self._waits[key] = CurrentWait(kind, workers, self._now(), text, get_ident(), served, about)
        return key

    def leave(self, key: int) -> None:
        """Note that a wait has ended."""
        self._waits.pop(key, None)

    def all(self) -> list[CurrentWait]:
        """Return the waits."""
        return list(self._waits.values())
