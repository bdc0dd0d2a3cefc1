"""What a session says to the agent that drives it: its state, what to do with what came, and what to do next."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Final


class State(enum.Enum):
    """Where a session is in its life."""

    CONNECTING = "connecting"
    CONNECTED = "connected"
    BROKEN = "broken"
    CLOSED = "closed"
    LOST = "lost"

    @property
    def is_over(self) -> bool:
        """Whether nothing can follow."""
        return self is State.CLOSED or self is State.LOST


TRANSITIONS: Final[dict[State, frozenset[State]]] = {
    State.CONNECTING: frozenset({State.CONNECTED, State.CLOSED, State.LOST}),
    State.CONNECTED: frozenset({State.BROKEN, State.CLOSED, State.LOST}),
    State.BROKEN: frozenset({State.CONNECTED, State.CLOSED, State.LOST}),
    State.CLOSED: frozenset(),
    State.LOST: frozenset(),
}


class Verdict(enum.Enum):
    """What to do with what came."""

    DELIVER = "new and in order: act on it"
    DUPLICATE = "came before: drop it"
    GAP = "something before it is missing: close the connection and call disconnected()"
    DROP = "nobody listens: there is no connection, the peer said goodbye, or the session has ended"


@dataclass(frozen=True, slots=True)
class SendAck:
    """Transmit an ACK, stamped with `acks()`."""


@dataclass(frozen=True, slots=True)
class SendPing:
    """Transmit a PING, stamped with `acks()` and `sent_up_to()`."""


@dataclass(frozen=True, slots=True)
class Cut:
    """Close the connection. The session has already given it up, so `disconnected` need not be called."""

    reason: str


@dataclass(frozen=True, slots=True)
class Reconnect:
    """Open a connection, then call `connected`, `refused`, or (if it broke in the handshake) `disconnected`."""


@dataclass(frozen=True, slots=True)
class Lost:
    """The session ended. Given once; fail all that waits for this peer."""

    reason: str


Effect = SendAck | SendPing | Cut | Reconnect | Lost
