"""Ordered actors: their methods run one at a time, in the order in which each caller called them.

Messages may overtake each other, so each caller numbers its calls on an object. `CallSequencer` is the caller's end:
it assigns the numbers. `OrderedQueue` is the owner's end: it runs the calls of each caller by number. Calls of
different callers run in the order in which they become ready.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from telegrad.errors import ReferenceGone
from telegrad.protocol.rref_ids import COUNTER_BITS, RRefId
from telegrad.rref.ids import describe
from telegrad.wire.messages import StreamPosition

Task = Callable[[Callable[[], None]], None]
"""Starts a call on another thread. Its argument must be called when the call is over."""


# -- the owner's end --------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _IncomingSequence:
    """The calls of one caller."""

    next_number: int = 0
    end: int | None = None
    """The number after the last call, once the caller has sent it."""
    early: dict[int, Task | None] = field(default_factory=dict)
    """Calls that arrived before an earlier one; None for a skipped call."""


class OrderedQueue:
    """The pending calls of one ordered object.

    >>> queue, log = OrderedQueue(), []
    >>> queue.put(7, StreamPosition((7, 0), 0, 1), lambda done: (log.append("second"), done()))
    >>> queue.put(7, StreamPosition((7, 0), 0, 0), lambda done: (log.append("first"), done()))
    >>> log
    ['first', 'second']
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # protects all below
        self._sequences: dict[tuple[int, int], _IncomingSequence] = {}  # by caller and sequence id
        self._lost: set[tuple[int, int]] = set()  # incarnations of callers that are lost
        self._ready: deque[Task] = deque()
        self._running = False
        self.running_call: object = None
        """The served call that runs now, for whoever looks."""

    def put(self, caller: int, position: StreamPosition, task: Task) -> None:
        """Add a call. It runs after all earlier calls of its caller, when no other call runs."""
        with self._lock:
            self._advance(caller, position, task)
        self._run_next()

    def skip(self, caller: int, position: StreamPosition, *, last: bool = False) -> None:
        """Do not wait for a call. If it is the `last`, the caller's sequence ends here."""
        with self._lock:
            if last and (caller, position.stream >> COUNTER_BITS) not in self._lost:
                sequence = self._sequences.setdefault((caller, position.stream), _IncomingSequence())
                sequence.end = position.number
                self._discard_if_complete(caller, position.stream, sequence)
            elif not last:
                self._advance(caller, position, None)
        self._run_next()

    def caller_lost(self, caller: int, incarnation: int) -> None:
        """Run the remaining calls of a lost caller without waiting for the missing ones. They fail when they start."""
        with self._lock:
            self._lost.add((caller, incarnation))
            for key in [key for key in self._sequences if key[0] == caller and key[1] >> COUNTER_BITS == incarnation]:
                sequence = self._sequences.pop(key)
                self._ready += [task for _, task in sorted(sequence.early.items()) if task is not None]
        self._run_next()

    def sequence_count(self) -> int:
        """Return the number of sequences that have not ended."""
        return len(self._sequences)

    def _advance(self, caller: int, position: StreamPosition, task: Task | None) -> None:
        if (caller, position.stream >> COUNTER_BITS) in self._lost:
            if task is not None:
                self._ready.append(task)
            return
        sequence = self._sequences.setdefault((caller, position.stream), _IncomingSequence())
        if position.number < sequence.next_number or position.number in sequence.early:
            if task is not None:  # the caller used a number twice: each call must end, and the order is its own concern
                self._ready.append(task)
            return
        sequence.early[position.number] = task
        while sequence.next_number in sequence.early:
            ready = sequence.early.pop(sequence.next_number)
            sequence.next_number += 1
            if ready is not None:
                self._ready.append(ready)
        self._discard_if_complete(caller, position.stream, sequence)

    def _discard_if_complete(self, caller: int, sequence_id: int, sequence: _IncomingSequence) -> None:
        if sequence.end is not None and sequence.next_number >= sequence.end:
            del self._sequences[caller, sequence_id]

    def _run_next(self) -> None:
        with self._lock:
            if self._running or not self._ready:
                return
            self._running = True
            task = self._ready.popleft()
        task(self._finish)

    def _finish(self) -> None:
        with self._lock:
            self._running = False
            self.running_call = None
        self._run_next()


# -- the caller's end -------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _OutgoingSequence:
    """The calls that this worker makes on one object."""

    id: int
    next_number: int = 0
    handles: int = 0


class CallSequencer:
    """Numbers the calls that this worker makes on ordered objects.

    All handles of an object share one sequence, so calls through different handles keep their order.
    """

    def __init__(self, incarnation: int) -> None:
        self._lock = threading.Lock()  # protects the two below
        self._ids = itertools.count(incarnation << COUNTER_BITS)  # the owner drops them when this incarnation is lost
        self._sequences: dict[tuple[int, RRefId], _OutgoingSequence] = {}

    def open(self, owner: int, rref: RRefId) -> None:
        """Count another handle of an object."""
        with self._lock:
            sequence = self._sequences.get((owner, rref))
            if sequence is None:
                sequence = self._sequences[owner, rref] = _OutgoingSequence(next(self._ids))
            sequence.handles += 1

    def next(self, owner: int, rref: RRefId) -> StreamPosition:
        """Return the position of the next call."""
        with self._lock:
            sequence = self._sequences.get((owner, rref))
            if sequence is None:  # another thread has just released the handle
                raise ReferenceGone(f"{describe(rref)} was released and can no longer be used")
            sequence.next_number += 1
            return StreamPosition(rref, sequence.id, sequence.next_number - 1)

    def close(self, owner: int, rref: RRefId) -> StreamPosition | None:
        """Discount a handle. Return where the sequence ends, if it was the last handle and calls were made."""
        with self._lock:
            sequence = self._sequences[owner, rref]
            sequence.handles -= 1
            if sequence.handles:
                return None
            del self._sequences[owner, rref]
            return StreamPosition(rref, sequence.id, sequence.next_number) if sequence.next_number else None

    def count(self) -> int:
        """Return the number of open sequences."""
        return len(self._sequences)
