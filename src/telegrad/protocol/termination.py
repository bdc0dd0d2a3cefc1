"""When is a computation that spreads over many workers over?

Two rules (Dijkstra and Scholten, 1980), seen from one worker:

1. The message that *engages* an idle worker is answered last: when the worker does nothing and all its own messages
   are answered.
2. Every other message is answered at once.

So when the worker that started it all does nothing and has all its answers, nobody computes and nothing is under way.

One message in two is saved where two workers talk back and forth: what a worker sends to the one that engaged it is
*counted* instead of answered. That one cannot be done before it has our last answer; the answer says how many such
messages were sent, and is held until they have all come.

A worker that gives up answers at once, first what engaged it and then whatever still comes: it takes no part any more.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

import msgspec

Ticket = TypeVar("Ticket")
"""Whatever the caller needs to answer a message."""


class Termination(msgspec.Struct, Generic[Ticket], eq=False):
    """One worker's part.

    >>> worker = Termination()
    >>> worker.received("m1")   # engages: answered later
    []
    >>> worker.received("m2")   # does not
    ['m2']
    >>> worker.sent()
    True
    >>> worker.answered()       # passive, and all is answered
    ['m1']
    """

    engaged: bool = False
    started_here: bool = False
    """The computation began at this worker: nobody waits for its answer, but for `quiet`."""
    active: int = 0
    """How much runs here."""
    owed: int = 0
    """How many of our messages are not answered."""
    _parent: Ticket | None = None
    _gave_up: bool = False
    _sender: Hashable = None
    _counted: dict[Hashable, int] = msgspec.field(default_factory=dict)
    """Sent to those that engaged us, ever, by worker."""
    _arrived: dict[Hashable, int] = msgspec.field(default_factory=dict)
    """Counted messages that came, ever, by worker."""
    _held: list[tuple[Hashable, int]] = msgspec.field(default_factory=list)
    """Answers that are ahead of counted messages."""

    def start(self) -> None:
        """Begin the computation, here. The worker is active until `idle`."""
        self.engaged = self.started_here = True
        self.active += 1

    def received(self, ticket: Ticket | None, sender: Hashable = None) -> list[Ticket]:
        """A message came, with a ticket or counted; returns the messages to answer now."""
        if ticket is None:
            self._received_counted(sender)
            return []
        # Who gave up must not be engaged again: what it waits for (an island, a worker that is lost) may never end.
        if self.engaged or self._gave_up:
            return [ticket]
        self.engaged = True
        self._parent, self._sender = ticket, sender
        # Not settled here: the worker has yet to act on the message. Call `settle` after that.
        return []

    def _received_counted(self, sender: Hashable) -> None:
        arrived = self._arrived
        arrived[sender] = arrived.get(sender, 0) + 1
        if self._held:
            waiting = [held for held in self._held if arrived.get(held[0], 0) < held[1]]
            self.owed -= len(self._held) - len(waiting)
            self._held = waiting

    def sent(self, to: Hashable = None) -> bool:
        """A message leaves; says whether it is to be answered. If not, it is counted."""
        if to is not None and self._parent is not None and to == self._sender:
            self._counted[to] = self._counted.get(to, 0) + 1
            return False
        self.owed += 1
        return True

    def count_for(self, worker: Hashable) -> int:
        """What an answer to this worker says: how many counted messages it has been sent, ever."""
        return self._counted.get(worker, 0)

    def answered(self, sender: Hashable = None, count: int = 0) -> list[Ticket]:
        """One of our messages was answered; returns the messages to answer now."""
        if count and self._arrived.get(sender, 0) < count:
            self._held.append((sender, count))
            return []
        self.owed -= 1
        return self.settle()

    def busy(self) -> None:
        """Something begins to run here."""
        self.active += 1

    def idle(self) -> list[Ticket]:
        """Something has ended here; returns the messages to answer now."""
        self.active -= 1
        return [] if self.active or self.owed or self.started_here else self.settle()

    def settle(self) -> list[Ticket]:
        """Rule 1: returns the message that engaged this worker, if it is time to answer it."""
        if self.active or self.owed or not self.engaged or self.started_here:
            return []
        self.engaged = False
        parent, self._parent = self._parent, None
        return [] if parent is None else [parent]

    @property
    def quiet(self) -> bool:
        """At the worker that started it: the computation is over, everywhere."""
        return self.started_here and not self._gave_up and not self.active and not self.owed

    def release(self) -> list[Ticket]:
        """Give up: returns the message that engaged this worker, which must be answered all the same."""
        parent, self._parent = self._parent, None
        self.engaged = False
        self._gave_up = True
        return [] if parent is None else [parent]
