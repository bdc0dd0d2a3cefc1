"""One calling direction between two workers, over any number of connections.

The agent owns sockets, threads and the clock. It drives one `Session` on each side, under one lock, and carries out the
effects that it returns. The *initiator* opens connections and reopens them, the *acceptor* waits; both send.

The rules:

1. Every frame is delivered exactly once and in the order of its lane (see `lanes`), or the session ends LOST.
2. Nobody waits forever. Every state has a limit in `SessionSettings`. The one exception is a connected session that is
   not resumable: its peer lives on this host, and the kernel reports the end of a dead process.
3. LOST and CLOSED are final: nothing is delivered, retained or sent again after them.
4. A goodbye means "I send no more". The side that said it still receives until the other says it, too. After a goodbye
   in either direction, the end of the connection is not a loss, and nobody reconnects.
5. A goodbye does not flush. Frames that are unacknowledged when the connection then ends are dropped. To avoid that,
   say goodbye when `unacked` is (0, 0). But a goodbye must not hide a gap: GOODBYE (or a PING right before it) carries
   `sent_up_to()`, and `heard` checks that all of it was received.
6. Requests are bounded (see `credits`). Replies, gradients and acknowledgements never are.

The session must only be told about the current connection; the agent drops late events of an old one. (Late frames do
no harm: they are duplicates, in order, or a gap. A late `disconnected` would break the new connection.)

What `tick` returns, by state:

========== =============================================================================================
CONNECTING OpenConnection (initiator, when an attempt is due), SessionLost after resume_limit
CONNECTED  SendAck, SendPing, or CloseConnection and what follows from a broken connection; nothing if not
           resumable, except the CloseConnection of a goodbye that was not returned
BROKEN     as CONNECTING
CLOSED     nothing
LOST       nothing
========== =============================================================================================
"""

from __future__ import annotations

from telegrad.errors import NotInitialized, ProtocolError, TelegradError, WorkerLost
from telegrad.protocol.lanes import BULK, CONTROL, NEVER, Lanes
from telegrad.protocol.limits import SessionSettings
from telegrad.protocol.reconnect import ReconnectSchedule
from telegrad.protocol.session_events import (
    TRANSITIONS,
    CloseConnection,
    Disposition,
    SendAck,
    SendPing,
    SessionEffect,
    SessionLost,
    SessionState,
)

__all__ = ["BULK", "CONTROL", "Session"]


class Session(Lanes):
    """One side of one calling direction.

    >>> session = Session(resumable=True, initiator=True, settings=SessionSettings(), now=0.0)
    >>> session.tick(now=0.0)
    [OpenConnection()]
    >>> session.send(CONTROL, b"hello", 5)
    1
    >>> session.connected(peer_received=(0, 0), now=0.1)
    [(0, 1, b'hello')]
    >>> session.received(CONTROL, 1, 1, 0, now=0.2).name, session.unacked
    ('DELIVER', (0, 0))

    `send` never makes `next_tick` earlier. Every method that takes `now` may: ask again after it.
    """

    __slots__ = (
        "_goodbye_heard",
        "_goodbye_limit",
        "_goodbye_said",
        "_lost_reason",
        "_ping_at",
        "_reconnect",
        "_sent_at_last_check",
        "_state",
    )

    def __init__(
        self, *, resumable: bool, initiator: bool, settings: SessionSettings, now: float, worker: str = ""
    ) -> None:
        super().__init__(resumable=resumable, settings=settings, now=now, worker=worker)
        self._state = SessionState.CONNECTING
        self._lost_reason: str | None = None
        self._goodbye_said = False
        self._goodbye_heard = False
        self._goodbye_limit = NEVER
        self._ping_at = NEVER
        self._sent_at_last_check = (0, 0)
        reason = f"no connection to {self._peer} could be opened"
        self._reconnect = ReconnectSchedule(reason, initiator=initiator, settings=settings, now=now)

    @property
    def state(self) -> SessionState:
        """The current state."""
        return self._state

    @property
    def is_connected(self) -> bool:
        """Whether a frame that is sent now can be transmitted now."""
        return self._state is SessionState.CONNECTED

    @property
    def lost_reason(self) -> str | None:
        """Why the session is LOST; None if it is not."""
        return self._lost_reason

    def heard(
        self, ack_control: int, ack_bulk: int, now: float, sent_up_to: tuple[int, int] | None = None
    ) -> Disposition:
        """Decide what to do with a frame that has no sequence number.

        PING and GOODBYE carry `sent_up_to`: the frames that must have been received before them.
        """
        if self._state is not SessionState.CONNECTED:
            return Disposition.DROP
        self._was_heard = True
        if self._resumable:
            self._heard_at = now
            self._acknowledged(ack_control, ack_bulk, now)
        if sent_up_to is not None and (
            sent_up_to[CONTROL] > self._received[CONTROL] or sent_up_to[BULK] > self._received[BULK]
        ):
            return Disposition.GAP
        return Disposition.DELIVER

    # -- connections --------------------------------------------------------------------------------------------

    def connected(self, peer_received: tuple[int, int], now: float) -> list[tuple[int, int, object]]:
        """Start using a new connection. Return (lane, sequence, frame) to transmit before anything else.

        A ProtocolError leaves the session unchanged; call `mark_lost` with it. An acceptor that still has an older
        connection first calls `disconnected`, then `received_up_to` for its reply, without releasing its lock between.
        """
        if SessionState.CONNECTED not in TRANSITIONS[self._state]:
            raise ProtocolError(
                f"{self._peer} opened a connection for a session that is {self._state.value}"
                + (f": {self._lost_reason}" if self._lost_reason else "")
            )
        self._check_peer_received(peer_received)
        self._acknowledged(*peer_received, now)
        retransmissions = self._retransmissions()
        self._move(SessionState.CONNECTED)
        self._is_receiving = True
        self._reconnect.succeeded(now)
        self._heard_at = now
        # The handshake told the peer what was received.
        self.acks()
        if self._resumable:
            self._ping_at = now + self._settings.heartbeat_interval
            self._sent_at_last_check = self.sent_up_to()
            self._waiting_since = [now if unacked else NEVER for unacked in self._unacked]
        else:
            self._retains = False
            self._discard_unacked()
        if not self._retains or not retransmissions:
            self._made_progress = True
        return retransmissions

    def disconnected(self, reason: str, now: float) -> list[SessionEffect]:
        """Record that the current connection ended, or that an attempt reached the peer but broke."""
        if self._state is SessionState.CONNECTED:
            return self._broke(reason, now)
        if self._reconnect.is_attempting:
            # Also if not resumable: a dead process refuses the next attempt, and one that lacks memory or file
            # descriptors is alive.
            self._reconnect.failed(now)
        return []

    def refused(self, reason: str, now: float) -> list[SessionEffect]:
        """Record that nobody listened at the peer's address."""
        if self._reconnect.is_attempting and self._reconnect.refused(now):
            return self._lose(f"{reason} for {self._settings.refuse_limit:g} s")
        return []

    def _broke(self, reason: str, now: float) -> list[SessionEffect]:
        if self._goodbye_said or self._goodbye_heard:
            self._end(SessionState.CLOSED)
            return []
        if not self._resumable:
            return self._lose(reason)
        if self._made_progress:
            self._made_progress = False
            self._reconnect.give_up_at = NEVER
        if self._reconnect.start_limit(reason, now):
            return self._lose(self._reconnect.give_up_reason())
        self._move(SessionState.BROKEN)
        self._is_receiving = False
        return self._reconnect.resume(now)

    # -- time ---------------------------------------------------------------------------------------------------

    def tick(self, now: float) -> list[SessionEffect]:
        """Do what is due. Afterwards `next_tick` is later than `now`."""
        if self._state is SessionState.CONNECTED:
            return self._tick_connected(now)
        if now >= self._reconnect.give_up_at:
            return self._lose(self._reconnect.give_up_reason())
        if now >= self._reconnect.attempt_at:
            return self._reconnect.attempt()
        return []

    def _tick_connected(self, now: float) -> list[SessionEffect]:
        settings = self._settings
        if now >= self._goodbye_limit:
            return self._close(f"{self._peer} did not answer the goodbye for {settings.silence_limit:g} s", now)
        if not self._resumable:
            return []
        if now >= self._heard_at + settings.silence_limit:
            return self._close(f"{self._peer} sent nothing for {settings.silence_limit:g} s", now)
        if self._acks_stalled():
            return self._close(
                f"{self._peer} sends frames, but acknowledged nothing for {settings.max_unacked_time:g} s", now
            )
        self._start_ack_timers(now)
        if now >= self._ping_at:
            self._ping_at = now + settings.heartbeat_interval
            sent = self.sent_up_to()
            if sent == self._sent_at_last_check:
                self.acks()
                return [SendPing()]
            self._sent_at_last_check = sent
        if now >= self._ack_at or self.ack_urgent:
            # The frame that carries out this effect has the acks; a tick before it is sent must not ask again.
            self.acks()
            return [SendAck()]
        return []

    def next_tick(self) -> float | None:
        """Return when to call `tick` next, at once if that has passed. None: there is nothing to wait for."""
        if self._state is SessionState.CONNECTED:
            due = self._goodbye_limit
            if self._resumable:
                due = min(due, self._ping_at, self._ack_at, self._heard_at + self._settings.silence_limit)
                if self.ack_urgent or self._acks_stalled():
                    due = min(due, self._heard_at)
        else:
            due = min(self._reconnect.give_up_at, self._reconnect.attempt_at)
        return None if due == NEVER else due

    def _close(self, reason: str, now: float) -> list[SessionEffect]:
        return [CloseConnection(reason), *self._broke(reason, now)]

    # -- the end ------------------------------------------------------------------------------------------------

    def say_goodbye(self, now: float) -> bool:
        """Stop sending. Return True if a GOODBYE must be transmitted (see rule 5 for what to send with it).

        Without a connection there is no peer to inform, and the session is CLOSED at once.
        """
        if self._goodbye_said or self._state.is_over:
            return False
        self._goodbye_said = True
        self._may_send = False
        is_connected = self._state is SessionState.CONNECTED
        self._goodbye_limit = now + self._settings.silence_limit
        if self._goodbye_heard or not is_connected:
            self._end(SessionState.CLOSED)
        return is_connected

    def hear_goodbye(self) -> None:
        """Process the peer's GOODBYE, once `heard` returned DELIVER for it."""
        if self._state is not SessionState.CONNECTED:
            return
        self._goodbye_heard = True
        self._is_receiving = False
        if self._goodbye_said:
            self._end(SessionState.CLOSED)

    def mark_lost(self, reason: str) -> None:
        """End the session for a reason that only the agent knows (a restart of the peer, a ProtocolError).

        If it was lost before, the first reason stays.
        """
        if not self._state.is_over:
            self._lose(reason)

    def _lose(self, reason: str) -> list[SessionEffect]:
        self._lost_reason = reason
        self._end(SessionState.LOST)
        return [SessionLost(reason)]

    def _end(self, state: SessionState) -> None:
        self._move(state)
        self._may_send = False
        self._is_receiving = False
        self._reconnect.stop()
        self._discard_unacked()

    def _move(self, state: SessionState) -> None:
        if state not in TRANSITIONS[self._state]:
            text = f"the session with {self._peer} cannot go from {self._state.value} to {state.value}"
            raise TelegradError(f"{text}; this is a bug in telegrad, please report it")
        self._state = state

    def _send_error(self) -> TelegradError:
        if self._lost_reason is not None:
            return WorkerLost(f"{self._peer} is lost: {self._lost_reason}", worker=self._worker)
        if self._goodbye_said:
            return NotInitialized(f"cannot send to {self._peer}: this worker is shutting down")
        return WorkerLost(f"{self._peer} has left the group", worker=self._worker)
