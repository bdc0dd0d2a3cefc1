"""The states of a session, what it says about a received frame, and the effects that its owner carries out."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Final


class SessionState(enum.Enum):
    """The states of a session."""

    CONNECTING = "connecting"
    CONNECTED = "connected"
    BROKEN = "broken"
    CLOSED = "closed"
    LOST = "lost"

    @property
    def is_over(self) -> bool:
        """Whether this state is final."""
        return self is SessionState.CLOSED or self is SessionState.LOST


TRANSITIONS: Final[dict[SessionState, frozenset[SessionState]]] = {
    SessionState.CONNECTING: frozenset({SessionState.CONNECTED, SessionState.CLOSED, SessionState.LOST}),
    SessionState.CONNECTED: frozenset({SessionState.BROKEN, SessionState.CLOSED, SessionState.LOST}),
    SessionState.BROKEN: frozenset({SessionState.CONNECTED, SessionState.CLOSED, SessionState.LOST}),
    SessionState.CLOSED: frozenset(),
    SessionState.LOST: frozenset(),
}


class Disposition(enum.Enum):
    """What to do with a received frame."""

    DELIVER = "new and in order: act on it"
    DUPLICATE = "received before: drop it"
    GAP = "an earlier frame is missing: close the connection and call disconnected()"
    DROP = "there is no connection, the peer said goodbye, or the session is over: drop it"


@dataclass(frozen=True, slots=True)
class SendAck:
    """Transmit an ACK with `acks()` in its header."""


@dataclass(frozen=True, slots=True)
class SendPing:
    """Transmit a PING with `acks()` in its header and `sent_up_to()` in its body."""


@dataclass(frozen=True, slots=True)
class CloseConnection:
    """Close the connection. The session treats it as closed already; do not call `disconnected`."""

    reason: str


@dataclass(frozen=True, slots=True)
class OpenConnection:
    """Open a connection, then call `connected`, `refused`, or (if it broke in the handshake) `disconnected`."""


@dataclass(frozen=True, slots=True)
class SessionLost:
    """The peer is lost. Emitted once; fail everything that waits for this peer."""

    reason: str


SessionEffect = SendAck | SendPing | CloseConnection | OpenConnection | SessionLost
