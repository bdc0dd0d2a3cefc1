"""Detects when a computation that spreads over many workers has ended (Dijkstra and Scholten, 1980).

Two rules, for each worker:

1. The message that *engages* an idle worker is acknowledged last: when the worker is passive and all its own messages
   are acknowledged.
2. Every other message is acknowledged at once.

Therefore, when the worker that started the computation is passive and all its messages are acknowledged, no worker
computes and no message is in flight.

An optimization halves the messages between two workers that talk back and forth: messages to the worker that engaged
this one are *counted* instead of acknowledged. That worker cannot finish before it has our final acknowledgement, which
says how many counted messages were sent and is held until all of them have been received.

A worker that gives up acknowledges at once, first the message that engaged it and then every later one.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

import msgspec

Ticket = TypeVar("Ticket")
"""Whatever the caller needs to acknowledge a message."""


class Termination(msgspec.Struct, Generic[Ticket], eq=False):
    """One worker's part in the detection.

    >>> worker = Termination()
    >>> worker.received("m1")     # engages: acknowledged later
    []
    >>> worker.received("m2")     # does not
    ['m2']
    >>> worker.sent()
    True
    >>> worker.acknowledged()     # passive, and nothing is unacknowledged
    ['m1']
    """

    engaged: bool = False
    started_here: bool = False
    """The computation started at this worker. Nobody waits for its acknowledgement; it waits for `quiet`."""
    active: int = 0
    """How many activities run here."""
    unacknowledged: int = 0
    """How many of our messages are not acknowledged."""
    _parent: Ticket | None = None
    gave_up: bool = False
    """This worker has stopped taking part."""
    _sender: Hashable = None
    _counted: dict[Hashable, int] = msgspec.field(default_factory=dict)
    """Counted messages that were sent, by worker, in total."""
    _received: dict[Hashable, int] = msgspec.field(default_factory=dict)
    """Counted messages that were received, by worker, in total."""
    _held: list[tuple[Hashable, int]] = msgspec.field(default_factory=list)
    """Acknowledgements that overtook counted messages."""

    def start(self) -> None:
        """Start the computation here. The worker is active until `idle`."""
        self.engaged = self.started_here = True
        self.active += 1

    def received(self, ticket: Ticket | None, sender: Hashable = None) -> list[Ticket]:
        """Record a message, with a ticket or counted. Return the messages to acknowledge now."""
        if ticket is None:
            received = self._received
            received[sender] = received.get(sender, 0) + 1
            if self._held:
                self._take_held()
            return []
        # A worker that gave up must not engage again: what it waits for (an island, a lost worker) may never end.
        if self.engaged or self.gave_up:
            return [ticket]
        self.engaged = True
        self._parent, self._sender = ticket, sender
        # The worker has yet to act on the message. It calls `settle` after that.
        return []

    def _take_held(self) -> None:
        """Take acknowledgements that all counted messages before them have now caught up with."""
        waiting = [held for held in self._held if self._received.get(held[0], 0) < held[1]]
        self.unacknowledged -= len(self._held) - len(waiting)
        self._held = waiting

    def sent(self, to: Hashable = None) -> bool:
        """Record that a message is sent. Return whether it must be acknowledged; if not, it is counted."""
        if to is not None and self._parent is not None and to == self._sender:
            self._counted[to] = self._counted.get(to, 0) + 1
            return False
        self.unacknowledged += 1
        return True

    def count_for(self, worker: Hashable) -> int:
        """Return the count to put into an acknowledgement to `worker`: counted messages sent to it, in total."""
        return self._counted.get(worker, 0)

    def acknowledged(self, sender: Hashable = None, count: int = 0) -> list[Ticket]:
        """Record that one of our messages was acknowledged. Return the messages to acknowledge now."""
        if count and self._received.get(sender, 0) < count:
            self._held.append((sender, count))
            return []
        self.unacknowledged -= 1
        return [] if self.active or self.unacknowledged or self.started_here else self.settle()

    def busy(self) -> None:
        """Record that an activity starts here."""
        self.active += 1

    def idle(self) -> list[Ticket]:
        """Record that an activity has ended here. Return the messages to acknowledge now."""
        self.active -= 1
        return [] if self.active or self.unacknowledged or self.started_here else self.settle()

    def settle(self) -> list[Ticket]:
        """Return the message that engaged this worker, if rule 1 says to acknowledge it now."""
        if self.active or self.unacknowledged or not self.engaged or self.started_here:
            return []
        self.engaged = False
        parent, self._parent = self._parent, None
        return [] if parent is None else [parent]

    @property
    def quiet(self) -> bool:
        """At the worker that started the computation: whether it has ended on every worker."""
        return self.started_here and not self.gave_up and not self.active and not self.unacknowledged

    def give_up(self) -> list[Ticket]:
        """Stop taking part. Return the message that engaged this worker, which must still be acknowledged."""
        parent, self._parent = self._parent, None
        self.engaged = False
        self.gave_up = True
        return [] if parent is None else [parent]
