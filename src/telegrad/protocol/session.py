"""One calling direction between two workers must outlive its connections; these are the rules by which it does.

The agent owns sockets, threads and the clock. It drives one `Session` on each side, under one lock, and does what the
verdicts and effects tell. The *initiator* opens connections and reopens them, the *acceptor* waits; both send.

The rules:

1. Every frame arrives exactly once and in the order of its lane, or the session ends LOST. There is no third way.
2. Nobody waits for ever. Every state has a limit in `SessionSettings`. The one exception is a connected session that is
   not resumable: its peer lives on this host, and the kernel reports the end of a dead process.
3. LOST and CLOSED are final: nothing is delivered, kept or resent after them.
4. A goodbye says "I send no more". Whoever said it still receives until it hears the other's. After a goodbye, said or
   heard, the end of the connection is no loss, and nobody reconnects.
5. A goodbye is no flush. What is not acknowledged when the connection then ends is dropped. Who cares says it when
   `kept` is (0, 0). But it must not hide a gap: GOODBYE (or a PING right before it) carries `sent_up_to()`, and `heard`
   checks that all of it came.
6. Requests are bounded (see `credits`). Replies, gradients, answers and acks never are.

Two kinds. *Resumable* (tcp): frames are kept until acknowledged, sent again on the next connection, dropped where they
come twice. *Not resumable* (unix sockets): a broken connection means a dead process, so nothing is acknowledged or
kept (but for frames that wait for the first connection), and any sequence but the next one is a `GAP`.

What the session relies on: it hears of the current connection only; late news of an old one is the agent's to drop.
(Late frames do no harm: they are duplicates, in order, or a gap. A late `disconnected` would break the new connection.)

What `tick` gives, by state:

========== =============================================================================================
CONNECTING Reconnect (initiator, when an attempt is due), Lost after resume_limit
CONNECTED  SendAck, SendPing, or Cut and what follows from a broken connection; nothing if not resumable,
           but for the Cut of a goodbye that was not answered
BROKEN     as CONNECTING
CLOSED     nothing
LOST       nothing
========== =============================================================================================
"""

from __future__ import annotations

from collections import deque
from typing import Final

from telegrad.errors import NotInitialized, ProtocolError, TelegradError, WorkerLost
from telegrad.protocol.limits import SessionSettings
from telegrad.protocol.session_events import (
    TRANSITIONS,
    Cut,
    Effect,
    Lost,
    Reconnect,
    SendAck,
    SendPing,
    State,
    Verdict,
)

CONTROL: Final = 0
BULK: Final = 1
LANE_NAMES: Final = ("control", "bulk")

_NEVER: Final = float("inf")

# Reading a member off its enum costs more than the whole check around it.
_DELIVER, _DUPLICATE, _GAP, _DROP = Verdict


class Session:
    """One side of one calling direction.

    >>> session = Session(resumable=True, initiator=True, settings=SessionSettings(), now=0.0)
    >>> session.tick(now=0.0)
    [Reconnect()]
    >>> session.send(CONTROL, b"hello", 5)
    1
    >>> session.connected(peer_received=(0, 0), now=0.1)
    [(0, 1, b'hello')]
    >>> session.received(CONTROL, 1, 1, 0, now=0.2).name, session.kept
    ('DELIVER', (0, 0))

    `send` never makes `next_tick` earlier. Every method that takes `now` may: ask again after it.
    """

    __slots__ = (
        "_ack_at",
        "_ack_delay",
        "_acked",
        "_attempt_at",
        "_attempting",
        "_backoff",
        "_broken_reason",
        "_connected_at",
        "_give_up_at",
        "_goodbye_heard",
        "_goodbye_said",
        "_heard_at",
        "_initiator",
        "_keeping",
        "_kept",
        "_leave_at",
        "_listening",
        "_lost_reason",
        "_may_send",
        "_owed_bytes",
        "_owed_frames",
        "_peer",
        "_ping_at",
        "_received",
        "_refused_since",
        "_resumable",
        "_sent",
        "_sent_at_look",
        "_settings",
        "_state",
        "_waiting_since",
        "_worker",
    )

    def __init__(
        self, *, resumable: bool, initiator: bool, settings: SessionSettings, now: float, worker: str = ""
    ) -> None:
        self._resumable = resumable
        self._initiator = initiator
        self._settings = settings
        self._worker = worker
        self._peer = f"worker {worker!r}" if worker else "the peer"
        self._state = State.CONNECTING
        self._lost_reason: str | None = None
        self._goodbye_said = False
        self._goodbye_heard = False
        # What the state and the goodbyes come to, in one look for the hot path.
        self._may_send = True
        self._listening = False
        self._keeping = True

        self._sent = [0, 0]
        self._received = [0, 0]
        self._acked = [0, 0]
        # kept[lane][i] has sequence acked[lane] + 1 + i.
        self._kept: tuple[deque[tuple[object, int]], deque[tuple[object, int]]] = (deque(), deque())
        self._ack_delay = settings.ack_delay
        self._ack_at = _NEVER
        self._owed_frames = 0
        self._owed_bytes = 0

        self._connected_at = now
        self._heard_at = now
        self._ping_at = _NEVER
        self._sent_at_look = (0, 0)
        # Since when a lane's oldest kept frame waits for its ack. `send` has no clock: the next tick sets it.
        self._waiting_since = [_NEVER, _NEVER]
        self._leave_at = _NEVER
        # Stays set over a reconnect until something gets through, so that endless resuming ends too.
        self._give_up_at = now + settings.resume_limit
        self._broken_reason = f"no connection to {self._peer} came about"
        self._attempt_at = now if initiator else _NEVER
        self._attempting = False
        self._backoff = settings.reconnect_backoff
        self._refused_since: float | None = None

    # Sending

    def send(self, lane: int, frame: object, size: int) -> int:
        """Number a frame. Transmit it now if `is_connected`; if not, the next `connected` gives it back."""
        if not self._may_send:
            raise self._why_nothing_is_sent()
        sequence = self._sent[lane] + 1
        if self._keeping:
            self._kept[lane].append((frame, size))  # before it counts: there may be no memory for it
        self._sent[lane] = sequence
        return sequence

    def acks(self) -> tuple[int, int]:
        """What to stamp on a header that leaves now. It pays the ack that was owed."""
        if not self._resumable:
            return (0, 0)
        self._ack_at = _NEVER
        self._owed_frames = 0
        self._owed_bytes = 0
        return (self._received[CONTROL], self._received[BULK])

    def sent_up_to(self) -> tuple[int, int]:
        """The highest sequences given out, for PING and GOODBYE.

        The peer takes a missing one for a broken connection. So these two frames must leave after all frames that
        have a number: number frames as they are handed to the socket, not as they are queued.
        """
        return (self._sent[CONTROL], self._sent[BULK])

    def received_up_to(self) -> tuple[int, int]:
        """The highest sequences that came in order, for the hello of the next connection."""
        return (self._received[CONTROL], self._received[BULK])

    # Receiving

    def received(self, lane: int, sequence: int, ack_control: int, ack_bulk: int, now: float, size: int = 0) -> Verdict:
        """Judge a sequenced frame of the current connection. See `ack_urgent` after it."""
        if not self._listening:
            return _DROP
        if lane != CONTROL and lane != BULK:
            raise ProtocolError(f"{self._peer} sent a frame on lane {lane}; there are only 0 (control) and 1 (bulk)")
        expected = self._received[lane] + 1
        if not self._resumable:
            if sequence != expected:
                return _GAP
            self._received[lane] = sequence
            return _DELIVER

        self._heard_at = now
        acked = self._acked
        if ack_control > acked[CONTROL] or ack_bulk > acked[BULK]:
            self._acknowledged(ack_control, ack_bulk, now)
        if sequence > expected:
            return _GAP
        self._owed_frames += 1
        self._owed_bytes += size
        if self._ack_at == _NEVER:
            self._ack_at = now + self._ack_delay
        if sequence < expected:
            if sequence < 1:
                raise ProtocolError(f"{self._peer} sent a frame of the {LANE_NAMES[lane]} lane without a sequence")
            return _DUPLICATE
        self._received[lane] = sequence
        return _DELIVER

    def heard(self, ack_control: int, ack_bulk: int, now: float, sent_up_to: tuple[int, int] | None = None) -> Verdict:
        """Judge a frame without a sequence. PING and GOODBYE bring `sent_up_to`: what must have come before them."""
        if self._state is not State.CONNECTED:
            return _DROP
        if self._resumable:
            self._heard_at = now
            self._acknowledged(ack_control, ack_bulk, now)
        if sent_up_to is not None and (
            sent_up_to[CONTROL] > self._received[CONTROL] or sent_up_to[BULK] > self._received[BULK]
        ):
            return _GAP
        return _DELIVER

    @property
    def ack_urgent(self) -> bool:
        """So much came unacknowledged that an ACK should leave at once (the next tick would ask for it too)."""
        return (
            self._owed_frames >= self._settings.ack_every_frames or self._owed_bytes >= self._settings.ack_every_bytes
        )

    def _acknowledged(self, ack_control: int, ack_bulk: int, now: float) -> None:
        for lane, ack in ((CONTROL, ack_control), (BULK, ack_bulk)):
            acked = self._acked[lane]
            # A smaller ack is old news, not an error: acks only grow.
            if ack <= acked:
                continue
            if ack > self._sent[lane]:
                raise ProtocolError(
                    f"{self._peer} acknowledged {LANE_NAMES[lane]} frame {ack}, but only {self._sent[lane]} were sent"
                )
            kept = self._kept[lane]
            for _ in range(ack - acked):
                kept.popleft()
            self._acked[lane] = ack
            self._waiting_since[lane] = now if kept else _NEVER
            self._give_up_at = _NEVER

    # Connections

    def connected(self, peer_received: tuple[int, int], now: float) -> list[tuple[int, int, object]]:
        """Start on a new connection: returns (lane, sequence, frame) to transmit before anything else.

        A ProtocolError leaves the session as it was; call `lost` with it. An acceptor that still believes in an older
        connection calls `disconnected` first, then takes `received_up_to` for its answer, in one hold of its lock.
        """
        if State.CONNECTED not in TRANSITIONS[self._state]:
            raise ProtocolError(
                f"a connection with {self._peer} came up for a session that is {self._state.value}"
                + (f": {self._lost_reason}" if self._lost_reason else "")
            )
        for lane, count in enumerate(peer_received):
            if not self._acked[lane] <= count <= self._sent[lane]:
                raise ProtocolError(
                    f"{self._peer} claims to have {count} {LANE_NAMES[lane]} frames, but {self._sent[lane]} were sent "
                    f"and it had acknowledged {self._acked[lane]} before; it may be another incarnation"
                )
        self._acknowledged(*peer_received, now)
        again = [
            (lane, self._acked[lane] + 1 + i, frame)
            for lane, kept in enumerate(self._kept)
            for i, (frame, _) in enumerate(kept)
        ]
        self._move(State.CONNECTED)
        self._listening = True
        self._attempting = False
        self._refused_since = None
        self._connected_at = now
        self._heard_at = now
        # The hello told the peer what came.
        self.acks()
        if self._resumable:
            self._ping_at = now + self._settings.heartbeat_interval
            self._sent_at_look = self.sent_up_to()
            self._waiting_since = [now if kept else _NEVER for kept in self._kept]
        else:
            self._keeping = False
            self._forget()
        if not self._keeping or not again:
            self._give_up_at = _NEVER
        return again

    def disconnected(self, reason: str, now: float) -> list[Effect]:
        """Tell the session that the current connection ended, or that an attempt got through but broke."""
        if self._state is State.CONNECTED:
            return self._broke(reason, now)
        if not self._attempting:
            return []
        # Also if it is not resumable: a process that is dead refuses the next attempt, and one that is short of memory
        # or file descriptors lives.
        self._refused_since = None
        self._attempt_later(now)
        return []

    def refused(self, reason: str, now: float) -> list[Effect]:
        """Tell the session that nobody listened where an attempt went."""
        if not self._attempting:
            return []
        if self._refused_since is None:
            self._refused_since = now
        limit = self._refused_since + self._settings.refuse_limit
        if now >= limit:
            return self._lose(f"{reason}; {self._peer} refused connections for {self._settings.refuse_limit:g} s")
        self._attempt_later(now)
        self._attempt_at = min(self._attempt_at, limit)
        return []

    def _broke(self, reason: str, now: float) -> list[Effect]:
        if self._goodbye_said or self._goodbye_heard:
            self._end(State.CLOSED)
            return []
        if not self._resumable:
            return self._lose(reason)
        self._broken_reason = reason
        if self._give_up_at == _NEVER:
            self._give_up_at = now + self._settings.resume_limit
        elif now >= self._give_up_at:
            return self._lose(self._why_given_up())
        self._move(State.BROKEN)
        self._listening = False
        if not self._initiator:
            return []
        if now - self._connected_at < self._settings.reconnect_backoff_limit:
            self._attempt_later(now)
            return []
        self._backoff = self._settings.reconnect_backoff
        return self._attempt()

    def _attempt(self) -> list[Effect]:
        self._attempting = True
        self._attempt_at = _NEVER
        return [Reconnect()]

    def _attempt_later(self, now: float) -> None:
        self._attempting = False
        self._attempt_at = now + self._backoff
        self._backoff = min(2 * self._backoff, self._settings.reconnect_backoff_limit)

    # Time

    def tick(self, now: float) -> list[Effect]:
        """Do what is due. Afterwards `next_tick` lies after `now`."""
        if self._state is State.CONNECTED:
            return self._tick_connected(now)
        if now >= self._give_up_at:
            return self._lose(self._why_given_up())
        if now >= self._attempt_at:
            return self._attempt()
        return []

    def _tick_connected(self, now: float) -> list[Effect]:
        settings = self._settings
        if now >= self._leave_at:
            return self._cut(f"{self._peer} did not answer our goodbye for {settings.silence_limit:g} s", now)
        if not self._resumable:
            return []
        if now >= self._heard_at + settings.silence_limit:
            return self._cut(f"nothing was heard from {self._peer} for {settings.silence_limit:g} s", now)
        if self._swallowed():
            return self._cut(
                f"{self._peer} is heard, but acknowledged nothing for {settings.max_unacked_time:g} s", now
            )
        for lane, kept in enumerate(self._kept):
            if kept and self._waiting_since[lane] == _NEVER:
                self._waiting_since[lane] = now
        if now >= self._ping_at:
            self._ping_at = now + settings.heartbeat_interval
            sent = self.sent_up_to()
            if sent == self._sent_at_look:
                self.acks()
                return [SendPing()]
            self._sent_at_look = sent
        if now >= self._ack_at or self.ack_urgent:
            # The frame that this effect makes pays the debt; a tick before it leaves must not ask again.
            self.acks()
            return [SendAck()]
        return []

    def next_tick(self) -> float | None:
        """When to call `tick` next; at once if that has passed; None: there is nothing to wait for."""
        if self._state is State.CONNECTED:
            due = self._leave_at
            if self._resumable:
                due = min(due, self._ping_at, self._ack_at, self._heard_at + self._settings.silence_limit)
                if self.ack_urgent or self._swallowed():
                    due = min(due, self._heard_at)
        else:
            due = min(self._give_up_at, self._attempt_at)
        return None if due == _NEVER else due

    def _swallowed(self) -> bool:
        # The peer must be heard after the limit: one that is silent as a whole (a long compile) gets the silence limit.
        return min(self._waiting_since) + self._settings.max_unacked_time <= self._heard_at

    def _cut(self, reason: str, now: float) -> list[Effect]:
        return [Cut(reason), *self._broke(reason, now)]

    # The end

    def say_goodbye(self, now: float) -> bool:
        """Promise to send no more. True: transmit a GOODBYE (see rule 5 for what goes with it).

        Without a connection there is nobody to tell, and the session is CLOSED at once.
        """
        if self._goodbye_said or self._state.is_over:
            return False
        self._goodbye_said = True
        self._may_send = False
        tell = self._state is State.CONNECTED
        self._leave_at = now + self._settings.silence_limit
        if self._goodbye_heard or not tell:
            self._end(State.CLOSED)
        return tell

    def hear_goodbye(self) -> None:
        """Take the peer's GOODBYE, once `heard` said DELIVER to it."""
        if self._state is not State.CONNECTED:
            return
        self._goodbye_heard = True
        self._listening = False
        if self._goodbye_said:
            self._end(State.CLOSED)

    def lost(self, reason: str) -> None:
        """End the session for what the agent knows (another incarnation, a ProtocolError). The first reason stays."""
        if not self._state.is_over:
            self._lose(reason)

    def _lose(self, reason: str) -> list[Effect]:
        self._lost_reason = reason
        self._end(State.LOST)
        return [Lost(reason)]

    def _end(self, state: State) -> None:
        self._move(state)
        self._may_send = False
        self._listening = False
        self._attempting = False
        self._attempt_at = _NEVER
        self._give_up_at = _NEVER
        self._forget()

    def _forget(self) -> None:
        for kept in self._kept:
            kept.clear()

    def _move(self, state: State) -> None:
        if state not in TRANSITIONS[self._state]:
            raise TelegradError(
                f"the session with {self._peer} cannot go from {self._state.value} to {state.value}; "
                "this is a bug in telegrad, please report it"
            )
        self._state = state

    def _why_given_up(self) -> str:
        return f"{self._broken_reason}; {self._settings.resume_limit:g} s of trying to resume brought nothing through"

    def _why_nothing_is_sent(self) -> TelegradError:
        if self._lost_reason is not None:
            return WorkerLost(f"{self._peer} is lost: {self._lost_reason}", worker=self._worker)
        if self._goodbye_said:
            return NotInitialized(f"nothing can be sent to {self._peer}: this worker has said goodbye and is leaving")
        return WorkerLost(f"{self._peer} said goodbye and left the group", worker=self._worker)

    @property
    def state(self) -> State:
        """Where the session is in its life."""
        return self._state

    @property
    def is_connected(self) -> bool:
        """Whether what is sent now can be transmitted now."""
        return self._state is State.CONNECTED

    @property
    def lost_reason(self) -> str | None:
        """Why the session is LOST; None if it is not."""
        return self._lost_reason

    @property
    def goodbye_heard(self) -> bool:
        """Whether the peer is leaving: it still reads, but sends no more, so a new request would have no answer."""
        return self._goodbye_heard

    @property
    def kept(self) -> tuple[int, int]:
        """How many frames, and bytes, are kept because they may have to be sent again."""
        return (sum(map(len, self._kept)), sum(size for kept in self._kept for _, size in kept))
