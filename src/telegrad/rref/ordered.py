"""Calls of one object, one at a time, in the order in which each caller made them.

Messages may overtake each other on the way, so each caller numbers its calls: a *turn* is a stream, which only that
caller uses, and a number in it. Calls of different callers run in the order in which their turns come up here.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from telegrad.protocol.ownership import LIFE
from telegrad.wire.messages import StreamPosition

Task = Callable[[Callable[[], None]], None]
"""Has a call run by another thread; it is given what to call when the call has ended."""


@dataclass(slots=True)
class _Stream:
    upcoming: int = 0
    end: int | None = None
    """Where it ends, once its caller has said so."""
    early: dict[int, Task | None] = field(default_factory=dict)


class OrderedQueue:
    """What waits for its turn at one object.

    >>> mailbox, log = OrderedQueue(), []
    >>> mailbox.put(7, StreamPosition((7, 0), 0, 1), lambda done: (log.append("second"), done()))
    >>> mailbox.put(7, StreamPosition((7, 0), 0, 0), lambda done: (log.append("first"), done()))
    >>> log
    ['first', 'second']
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # protects all below
        self._streams: dict[tuple[int, int], _Stream] = {}  # by caller and stream
        self._lost: set[tuple[int, int]] = set()  # lives of callers that are gone
        self._due: deque[Task] = deque()
        self._running = False

    def put(self, caller: int, turn: StreamPosition, task: Task) -> None:
        """A call came; it runs when all that its caller made before it have ended, and no other runs."""
        with self._lock:
            self._arrived(caller, turn, task)
        self._run_next()

    def skip(self, caller: int, turn: StreamPosition, *, last: bool = False) -> None:
        """A call will not come. If it is the `last`, none will after it, and the stream ends here."""
        with self._lock:
            if last and (caller, turn.stream >> LIFE) not in self._lost:
                stream = self._streams.setdefault((caller, turn.stream), _Stream())
                stream.end = turn.number
                self._tidy(caller, turn.stream, stream)
            elif not last:
                self._arrived(caller, turn, None)
        self._run_next()

    def lost(self, caller: int, life: int) -> None:
        """A caller is gone: its calls that wait for one that will never come run now (and find that out)."""
        with self._lock:
            self._lost.add((caller, life))
            for key in [key for key in self._streams if key[0] == caller and key[1] >> LIFE == life]:
                stream = self._streams.pop(key)
                self._due += [task for _, task in sorted(stream.early.items()) if task is not None]
        self._run_next()

    def waiting(self) -> int:
        """How many streams are remembered."""
        return len(self._streams)

    def _arrived(self, caller: int, turn: StreamPosition, task: Task | None) -> None:
        if (caller, turn.stream >> LIFE) in self._lost:
            if task is not None:
                self._due.append(task)
            return
        stream = self._streams.setdefault((caller, turn.stream), _Stream())
        stream.early[turn.number] = task
        while stream.upcoming in stream.early:
            due = stream.early.pop(stream.upcoming)
            stream.upcoming += 1
            if due is not None:
                self._due.append(due)
        self._tidy(caller, turn.stream, stream)

    def _tidy(self, caller: int, number: int, stream: _Stream) -> None:
        if stream.end is not None and stream.upcoming >= stream.end:
            del self._streams[caller, number]

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
