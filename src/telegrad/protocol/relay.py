"""Which halves of relayed connections a relay joins.

1. A caller comes with a ticket, and says whom it wants. If that worker has a connection to the relay, it is told the
   ticket, and the caller waits. Otherwise the caller is refused.
2. The target comes with the ticket, once and in time. Then the two are joined. Nobody else can come with it.
3. At most `limit` callers wait, each for `patience` seconds, and at most `limit` pairs are joined.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Waiting:
    """A caller that waits for its target."""

    target: int
    until: float


class RelayTable:
    """The tickets of one relay."""

    def __init__(self, limit: int, patience: float) -> None:
        self._limit = limit
        self._patience = patience
        self._waiting: dict[bytes, Waiting] = {}  # the one that waits longest comes first
        self.joined = 0
        """How many pairs are joined now."""

    def caller_came(self, ticket: bytes, target: int, now: float) -> bool:
        """Return whether the target is to be told: otherwise the relay is full, or the ticket is known."""
        if ticket in self._waiting or len(self._waiting) + self.joined >= self._limit:
            return False
        self._waiting[ticket] = Waiting(target, now + self._patience)
        return True

    def target_came(self, ticket: bytes, target: int) -> bool:
        """Return whether the target and the caller are to be joined."""
        waiting = self._waiting.get(ticket)
        if waiting is None or waiting.target != target:
            return False
        del self._waiting[ticket]
        self.joined += 1
        return True

    def pair_ended(self) -> None:
        """Note that a pair is not joined any more."""
        self.joined -= 1

    def forget(self, ticket: bytes) -> None:
        """Forget a caller that has left, or cannot be served."""
        self._waiting.pop(ticket, None)

    def expire(self, now: float) -> list[bytes]:
        """Forget the callers whose time is over, and return their tickets."""
        over = [ticket for ticket, waiting in self._waiting.items() if waiting.until <= now]
        for ticket in over:
            del self._waiting[ticket]
        return over
