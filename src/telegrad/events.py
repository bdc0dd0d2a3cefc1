"""What an agent has done lately, in a ring: one plain tuple for each call, pass, connection and so on, when it ends.

Recording must cost next to nothing, because it is on by default: an event is one tuple in a `collections.deque`. What
is in progress is not recorded at all, since whoever looks finds it in the tables of the agent. `telegrad.observe` turns
the tuples into `telegrad.observe.model.Event`, whose fields are in the same order. Entries are flat, and are made in
one expression where the event happens: one that is put together from parts takes three times as long. Time is spent on
each bytecode and each object, whichever thread runs them and when; so calls that went well, the most frequent events,
have no fields that would be empty, and `whole` adds them for whoever reads.

A call for whose event there is no memory does not fail: the event is left out. Its number has been taken by then, so
readers are told that it was dropped.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable
from functools import partial
from threading import get_ident
from typing import Any

CALL, SERVE, PASS, ISLAND, GATE, PROBE = "call", "serve", "pass", "island", "gate", "probe"
GRADIENT_SENT, GRADIENT_ARRIVED, CONTEXT, STEP = "gradient-sent", "gradient-arrived", "context", "step"
REFERENCE, CONNECTION, MEMBER, COLLECTIVE = "reference", "connection", "member", "collective"

DEFAULT_SIZE = 8192
_TORN = 256  # so many later events after a missing one: it will not come any more

Entry = tuple[Any, ...]
"""Number, kind, began, ended, id, peer, what, context, pass, parent, outcome, size, received, thread, and any marks."""
FIELDS = 14
"""How many there are before the marks."""


def whole(entry: Entry) -> Entry:
    """Return an entry with all fields.

    Calls, the most frequent events, have a function in place of the kind. It adds the missing fields.

    >>> whole((5, "step", 1.0, 2.0, 0, "", "Adam", 0, 0, None, "", 0, 0, 123))
    (5, 'step', 1.0, 2.0, 0, '', 'Adam', 0, 0, None, '', 0, 0, 123)
    >>> whole((5, lambda entry: (entry[0], "call", *entry[2:]), 1.0, 2.0))
    (5, 'call', 1.0, 2.0)
    """
    return entry if type(entry[1]) is str else entry[1](entry)


def _nothing_to_record() -> None:
    """Do nothing."""


class EventRing:
    """The latest events of one agent.

    >>> ring = EventRing(2)
    >>> for what in "abc":
    ...     ring.record("member", 1.0, 1.0, what=what)
    >>> entries, following, dropped = ring.since(0)
    >>> [entry[6] for entry in entries], following, dropped
    (['b', 'c'], 3, 1)
    """

    def __init__(self, size: int = DEFAULT_SIZE) -> None:
        self.on = size > 0
        """Whether events are recorded."""
        self._entries: deque[Entry] = deque(maxlen=size)
        # `next(numbers)` and `append` are single operations of the interpreter: no lock is needed. Hot paths call them
        # directly, and look `append` up first: calling an attribute that is no method is slow in CPython 3.11.
        self.numbers = itertools.count()
        self.append: Callable[[Entry], None] = self._entries.append
        self._listeners: tuple[Callable[[Entry], None], ...] = ()
        self.unrecorded: list[tuple[Any, float, int]] = []  # hardly ever more than one for each thread
        """Calls that have ended, when, and the bytes of their replies.

        They are recorded when a thread waits for another worker, or when somebody reads.
        """
        self.catch_up: Callable[[], None] = _nothing_to_record
        """Records them."""

    def record(
        self,
        kind: str,
        began: float,
        ended: float,
        number: int = 0,
        *,
        peer: str = "",
        what: str = "",
        context: int = 0,
        pass_id: int = 0,
        parent: tuple[str, int] | None = None,
        outcome: str = "",
        size: int = 0,
        received: int = 0,
        thread: int = 0,
        marks: tuple[float, ...] = (),
    ) -> None:
        """Record an event. `number` is the id of what it is about."""
        if self.on:
            if self.unrecorded:
                self.catch_up()
            thread = thread or get_ident()
            about = (number, peer, what, context, pass_id, parent, outcome, size, received, thread)
            try:
                self.append((next(self.numbers), kind, began, ended, *about, *marks))
            except MemoryError:
                return  # see `telegrad.events`

    def listen(self, listener: Callable[[Entry], None]) -> Callable[[], None]:
        """Have every event handed to `listener` as well, on the thread that records it. Returns what ends that.

        >>> ring, seen = EventRing(2), []
        >>> end = ring.listen(lambda entry: seen.append(entry[1]))
        >>> ring.record("step", 1.0, 2.0)
        >>> end()
        >>> ring.record("pass", 1.0, 2.0)
        >>> seen, [entry[1] for entry in ring.since(0)[0]]
        (['step'], ['step', 'pass'])
        """
        self._listeners = (*self._listeners, listener)
        self._set_append()
        return partial(self._end, listener)

    def _end(self, listener: Callable[[Entry], None]) -> None:
        self._listeners = tuple(each for each in self._listeners if each is not listener)
        self._set_append()

    def _set_append(self) -> None:
        self.append = self._append_and_tell if self._listeners else self._entries.append

    def _append_and_tell(self, entry: Entry) -> None:
        self._entries.append(entry)
        for listener in self._listeners:
            listener(whole(entry))

    def since(self, first: int) -> tuple[list[Entry], int, int]:
        """Return the events from number `first` on, the number to ask for next, and how many were dropped."""
        self.catch_up()
        entries = sorted(self._entries)  # numbers differ, so nothing else is compared
        entries = [entry for entry in entries if entry[0] >= first]
        if not entries:
            return [], first, 0
        dropped, expected = entries[0][0] - first, entries[0][0]
        for index, entry in enumerate(entries):
            if entry[0] != expected:
                # Another thread has taken the number, and is about to append the event: the reader gets it next time.
                if len(entries) - index < _TORN:
                    del entries[index:]
                    break
                dropped += entry[0] - expected
            expected = entry[0] + 1
        return [whole(entry) for entry in entries], expected, dropped
