"""Ordered, exactly-once delivery on two lanes: sequence numbers, acknowledgements and retransmission.

A *resumable* session (tcp) retains frames until the peer acknowledges them, sends them again on the next connection and
drops duplicates. A session that is not resumable (unix sockets) acknowledges and retains nothing, except frames that
wait for the first connection, and treats any sequence number but the next one as a `GAP`.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from telegrad.errors import ProtocolError, TelegradError
from telegrad.protocol.limits import SessionSettings
from telegrad.protocol.session_events import Disposition

CONTROL: Final = 0
BULK: Final = 1
LANE_NAMES: Final = ("control", "bulk")

NEVER: Final = float("inf")

# Local names: reading a member off its enum costs more than the whole check around it.
_DELIVER, _DUPLICATE, _GAP, _DROP = Disposition


class Lanes:
    """Both lanes of one side of a session. `Session` adds the connections and the clock.

    A base class rather than a member, because `send` and `received` run once per frame and must not delegate.
    """

    __slots__ = (
        "_ack_at",
        "_ack_delay",
        "_acked",
        "_heard_at",
        "_is_receiving",
        "_made_progress",
        "_may_send",
        "_peer",
        "_received",
        "_resumable",
        "_retains",
        "_sent",
        "_settings",
        "_unacked",
        "_unacked_bytes",
        "_unreported_bytes",
        "_unreported_frames",
        "_waiting_since",
        "_was_heard",
        "_worker",
    )

    def __init__(self, *, resumable: bool, settings: SessionSettings, now: float, worker: str) -> None:
        self._resumable = resumable
        self._settings = settings
        self._worker = worker
        self._peer = f"worker {worker!r}" if worker else "the peer"
        # These summarize the session's state in one flag each, for the hot path.
        self._may_send = True
        self._is_receiving = False
        self._retains = True

        self._sent = [0, 0]
        self._received = [0, 0]
        self._acked = [0, 0]
        # _unacked[lane][i] has sequence _acked[lane] + 1 + i.
        self._unacked: tuple[deque[tuple[object, int]], deque[tuple[object, int]]] = (deque(), deque())
        self._unacked_bytes = 0
        # Since when a lane's oldest unacknowledged frame has waited. `send` has no clock: the next tick sets it.
        self._waiting_since = [NEVER, NEVER]
        self._ack_delay = settings.ack_delay
        self._ack_at = NEVER
        # Received since the last acknowledgement that was sent.
        self._unreported_frames = 0
        self._unreported_bytes = 0
        self._heard_at = now
        self._was_heard = False  # whether a frame without a number has arrived
        self._made_progress = False
        """Whether a frame was acknowledged since the last connection broke."""

    # -- sending ------------------------------------------------------------------------------------------------

    def send(self, lane: int, frame: object, size: int) -> int:
        """Assign a frame its sequence number. Transmit it now if connected; otherwise `connected` will return it."""
        if not self._may_send:
            raise self._send_error()
        sequence = self._sent[lane] + 1
        if self._retains:
            self._unacked[lane].append((frame, size))  # before it counts: this may raise MemoryError
            self._unacked_bytes += size
        self._sent[lane] = sequence
        return sequence

    def _send_error(self) -> TelegradError:
        """Return the exception that `send` raises when nothing can be sent."""
        raise NotImplementedError  # pragma: no cover - Session, the only subclass, overrides it

    def acks(self) -> tuple[int, int]:
        """Return the acknowledgements to put into a header that is sent now, and mark them as sent."""
        if not self._resumable:
            return (0, 0)
        self._ack_at = NEVER
        self._unreported_frames = 0
        self._unreported_bytes = 0
        return (self._received[CONTROL], self._received[BULK])

    def sent_up_to(self) -> tuple[int, int]:
        """Return the highest sequence numbers assigned, for PING and GOODBYE.

        The peer treats a missing one as a broken connection. So these two frames must be transmitted after all numbered
        frames: number frames when they are handed to the socket, not when they are queued.
        """
        return (self._sent[CONTROL], self._sent[BULK])

    # -- receiving ----------------------------------------------------------------------------------------------

    @property
    def was_used(self) -> bool:
        """Whether anything was received over it. If not, the initiator may have given it up in the handshake."""
        return self._was_heard or self.received_up_to() != (0, 0)

    def received_up_to(self) -> tuple[int, int]:
        """Return the highest sequence numbers received in order, for the handshake of the next connection."""
        return (self._received[CONTROL], self._received[BULK])

    def received(
        self, lane: int, sequence: int, ack_control: int, ack_bulk: int, now: float, size: int = 0
    ) -> Disposition:
        """Decide what to do with a numbered frame of the current connection. Check `ack_urgent` afterwards."""
        if not self._is_receiving:
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
        self._unreported_frames += 1
        self._unreported_bytes += size
        if self._ack_at == NEVER:
            self._ack_at = now + self._ack_delay
        if sequence < expected:
            if sequence < 1:
                raise ProtocolError(f"{self._peer} sent a {LANE_NAMES[lane]} frame without a sequence number")
            return _DUPLICATE
        self._received[lane] = sequence
        return _DELIVER

    @property
    def ack_urgent(self) -> bool:
        """Whether enough frames are unacknowledged to send an ACK at once (the next tick would ask for it, too)."""
        return (
            self._unreported_frames >= self._settings.ack_every_frames
            or self._unreported_bytes >= self._settings.ack_every_bytes
        )

    # -- acknowledgements and retransmission --------------------------------------------------------------------

    def _acknowledged(self, ack_control: int, ack_bulk: int, now: float) -> None:
        """Drop the frames that the peer has acknowledged."""
        for lane, ack in ((CONTROL, ack_control), (BULK, ack_bulk)):
            acked = self._acked[lane]
            # A smaller ack is out of date, not an error: acks only grow.
            if ack <= acked:
                continue
            if ack > self._sent[lane]:
                raise ProtocolError(
                    f"{self._peer} acknowledged {LANE_NAMES[lane]} frame {ack}, but only {self._sent[lane]} were sent"
                )
            unacked = self._unacked[lane]
            for _ in range(ack - acked):
                self._unacked_bytes -= unacked.popleft()[1]
            self._acked[lane] = ack
            self._waiting_since[lane] = now if unacked else NEVER
            self._made_progress = True

    def _start_ack_timers(self, now: float) -> None:
        for lane, unacked in enumerate(self._unacked):
            if unacked and self._waiting_since[lane] == NEVER:
                self._waiting_since[lane] = now

    def _acks_stalled(self) -> bool:
        # The peer must be heard after the limit: if it sends nothing at all (a long compile), silence_limit applies.
        return min(self._waiting_since) + self._settings.max_unacked_time <= self._heard_at

    def _check_peer_received(self, peer_received: tuple[int, int]) -> None:
        """Raise ProtocolError if the peer cannot have received what it says."""
        for lane, count in enumerate(peer_received):
            if not self._acked[lane] <= count <= self._sent[lane]:
                raise ProtocolError(
                    f"{self._peer} says that it received {count} {LANE_NAMES[lane]} frames, but {self._sent[lane]} "
                    f"were sent and it had acknowledged {self._acked[lane]}; it may have been restarted"
                )

    def _retransmissions(self) -> list[tuple[int, int, object]]:
        """Return (lane, sequence, frame) of everything that is unacknowledged, in order."""
        return [
            (lane, self._acked[lane] + 1 + i, frame)
            for lane, unacked in enumerate(self._unacked)
            for i, (frame, _) in enumerate(unacked)
        ]

    def _discard_unacked(self) -> None:
        for unacked in self._unacked:
            unacked.clear()
        self._unacked_bytes = 0

    @property
    def unacked(self) -> tuple[int, int]:
        """How many frames, and bytes, are retained because they may have to be sent again."""
        return (sum(map(len, self._unacked)), self._unacked_bytes)

    @property
    def unacked_bytes(self) -> int:
        """How many bytes are retained."""
        return self._unacked_bytes
