"""Calls of one object, one at a time, in the order in which each caller made them.

Messages may overtake each other on the way, so each caller numbers its calls: a *turn* is a stream, which only that
caller uses, and a number in it. Calls of different callers run in the order in which their turns come up here.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

Task = Callable[[Callable[[], None]], None]
"""Has a call run by another thread; it is given what to call when the call has ended."""

Turn = tuple[int, int]


class Mailbox:
    """What waits for its turn at one object.

    >>> mailbox, log = Mailbox(), []
    >>> mailbox.put(7, (0, 1), lambda done: (log.append("second"), done()))
    >>> mailbox.put(7, (0, 0), lambda done: (log.append("first"), done()))
    >>> log
    ['first', 'second']
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # protects all below
        self._next: dict[tuple[int, int], int] = {}
        self._early: dict[tuple[int, int], dict[int, Task | None]] = {}
        self._due: deque[Task] = deque()
        self._running = False

    def put(self, caller: int, turn: Turn, task: Task) -> None:
        """A call came; it runs when all that its caller made before it have ended, and no other runs."""
        self._arrived(caller, turn, task)

    def skip(self, caller: int, turn: Turn) -> None:
        """A call will never come."""
        self._arrived(caller, turn, None)

    def lost(self, caller: int) -> None:
        """A caller is gone: what waits for a call of its that will never come is dropped."""
        with self._lock:
            for key in [key for key in self._early if key[0] == caller]:
                del self._early[key]
            for key in [key for key in self._next if key[0] == caller]:
                del self._next[key]

    def _arrived(self, caller: int, turn: Turn, task: Task | None) -> None:
        stream, number = turn
        key = caller, stream
        with self._lock:
            early = self._early.setdefault(key, {})
            early[number] = task
            upcoming = self._next.get(key, 0)
            while upcoming in early:
                due = early.pop(upcoming)
                if due is not None:
                    self._due.append(due)
                upcoming += 1
            self._next[key] = upcoming
            if not early:
                del self._early[key]
        self._run_next()

    def _run_next(self) -> None:
        with self._lock:
            if self._running or not self._due:
                return
            self._running = True
            task = self._due.popleft()
        task(self._ended)

    def _ended(self) -> None:
        with self._lock:
            self._running = False
        self._run_next()
