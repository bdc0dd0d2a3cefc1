"""Reads frames from the link of a channel, assembles them into messages, and delivers these to the agent."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from telegrad.connection.peer_account import Held
from telegrad.errors import LimitExceeded, ProtocolError, is_shortage
from telegrad.execution.executor import GuaranteedTask
from telegrad.protocol.session_events import Disposition, SessionState
from telegrad.transport.base import Link, LinkClosed, Ready
from telegrad.transport.shared_memory import SharedMemory
from telegrad.wire.frames import (
    BULK,
    BULK_HEAD,
    CONTROL,
    MESSAGE,
    SLAB_KINDS,
    Frame,
    Kind,
    Message,
    lane_of,
    unpack_goodbye,
    unpack_ping,
)
from telegrad.wire.reassembly import Assembler, DiscardedMessage

if TYPE_CHECKING:
    from telegrad.connection.channel import Channel

_log = logging.getLogger("telegrad")

_DELIVER, _GAP = Disposition.DELIVER, Disposition.GAP
_FRAMES_IN_TURN = 64
"""Frames of a peer with limits that are taken at once. A refused request takes a tenth of a millisecond."""


class Receiver:
    """The receiving half of a channel. Only the elected reader may call `pump`, so its state needs no lock."""

    def __init__(self, channel: Channel, allocate: Callable[[int], memoryview]) -> None:
        self._channel = channel
        self._local = local = channel.local
        self._peers = channel.peers
        self._session = channel.session
        self._lock = channel.lock
        self._resumable = channel.resumable
        role = "receiving a reply from" if channel.outgoing else "receiving a request from"
        self._assembler = Assembler(local.limits, allocate, f"worker {local.me.name!r}, {role} worker {channel.peer!r}")
        self._reserved: Held | None = None  # of the large message that is being received
        self.held: Held | None = None
        """What the message that is being delivered holds, if it was large. Whoever keeps the message takes it."""
        if channel.account is not None:
            self._assembler.refuse = channel.account.size_error
            self._assembler.reserve = self._reserve
        self.received = 0
        """Bytes of messages received, over the link or in shared memory."""
        self.completions: list[GuaranteedTask] = []
        """Callbacks of futures whose replies have just been read."""
        self.inbox: deque[Callable[[], None]] | None = None
        """Where the reader collects handlers of one-way messages to run them itself. None: the executor runs them."""

    def on_ready(self, ready: int) -> None:
        """Write and read as much as the link allows. Called by the poller."""
        link = self._channel.link
        if link is None:
            return
        if ready & Ready.WRITE:
            link.flush()
        if ready & Ready.READ:
            readers = self._channel.readers
            with self._lock:
                readers.armed, readers.reported = False, True
                if readers.reading:
                    return  # the thread that reads will see the data
                readers.reading = True
            try:
                self.pump()
            finally:
                readers.stop_polled_read()

    def pump(self) -> None:
        """Read what is available on the link and deliver it. Only the elected reader may call this."""
        channel = self._channel
        link = channel.link
        if link is None:
            return
        try:
            if channel.account is None or channel.outgoing:
                for frame in link.receive():
                    self._take(frame)
            else:
                self._pump_in_turns(link)
        except LinkClosed as error:
            channel.link_ended(link, str(error), by_peer=True)
        except ProtocolError as error:
            if self._resumable and self._session.state is SessionState.CONNECTED:  # else the loss is reported
                _log.warning("closed the connection with worker %r (%s): %s", channel.peer, link.peer, error)
            channel.link_ended(link, f"it broke the protocol: {error}")
        except BaseException as error:
            if not is_shortage(error):
                channel.interrupted(link, "receiving", error)
                raise
            self._retry_later(error)
        finally:
            if self.completions:
                completions, self.completions = self.completions, []
                channel.readers.expect_fewer(len(completions))
                self._local.executor.submit_all(completions)
        memory = channel.memory
        if memory is not None and memory.unreferenced:
            memory.send_releases()
        if self._resumable:
            if self._session.ack_urgent:
                channel.driver.tick()  # on this thread: a handoff in the middle of a large message is slow
            else:
                channel.driver.schedule()

    def _pump_in_turns(self, link: Link) -> None:
        """Read some frames of a peer that has limits. If there are more, other links are read before them."""
        for taken, frame in enumerate(link.receive(), 1):
            self._take(frame)
            if taken == _FRAMES_IN_TURN:
                # The poller does not report what the link has read already.
                self._local.executor.timers.at(self._local.runtime.now(), partial(self.on_ready, Ready.READ))
                return

    def _retry_later(self, error: BaseException) -> None:
        """Retry after this worker ran out of a resource. The link still holds what it read."""
        _log.warning("worker %r cannot read from worker %r: %r", self._local.me.name, self._channel.peer, error)
        self._local.executor.pause()
        # The poller does not report data that has been read from the socket but was not taken.
        self._local.executor.timers.at(self._local.runtime.now(), partial(self.on_ready, Ready.READ))

    def _take(self, frame: Frame) -> None:
        kind, sequence, ack_control, ack_bulk, body = frame
        session, memory = self._session, self._channel.memory
        now = self._local.runtime.now() if self._resumable else 0.0
        if memory is not None:
            if ack_control:
                memory.apply_releases(ack_control, ack_bulk)
            if kind == BULK_HEAD:  # the peer found no room in shared memory
                memory.send_releases(at_least=1)
        if sequence:
            failure: Exception | None = None
            message: Message | None = None
            try:
                message = self._assembler.read(frame)
            except ProtocolError:
                raise
            except Exception as error:  # noqa: BLE001 - our failure: the frame still counts, or the next would be a gap
                failure = error
            lane = CONTROL if kind == MESSAGE else lane_of(kind)
            with self._lock:
                disposition = session.received(lane, sequence, ack_control, ack_bulk, now, len(body))
            if disposition is _DELIVER:
                try:
                    if failure is not None:
                        raise failure
                    if message is None:
                        message = self._assembler.add(frame)
                        if message is not None:
                            self.held, self._reserved = self._reserved, None
                    if type(message) is DiscardedMessage:
                        if message.truncated:
                            self._delivery_failed(frame, message, message.error)
                        else:
                            self._peers.deliver(self._channel, message)
                    elif message is not None:
                        self.received += message.total
                        self._peers.deliver(self._channel, message)
                except ProtocolError as error:
                    # The session counts the frame as received, so the peer would not send it again.
                    with self._lock:
                        session.mark_lost(f"it broke the protocol: {error}")
                    raise
                except Exception as error:  # noqa: BLE001 - this worker failed, not the peer
                    self._delivery_failed(frame, message, error)
                finally:
                    self.held = None
            elif disposition is _GAP:
                raise ProtocolError(f"frame {sequence} of lane {lane} arrived before its predecessors")
            return
        if kind in SLAB_KINDS:
            if memory is None:
                raise ProtocolError(f"a frame of kind {kind} about shared memory, which this connection does not have")
            memory.handle_frame(kind, body)
            return
        sent, cause = None, ""
        if kind == Kind.PING:
            sent = unpack_ping(body)
        elif kind == Kind.GOODBYE:
            sent, cause = unpack_goodbye(body)
        with self._lock:
            disposition = session.heard(ack_control, ack_bulk, now, sent)
            if disposition is _DELIVER and kind == Kind.GOODBYE:
                session.hear_goodbye()
        if disposition is _GAP:
            raise ProtocolError("frames that were sent before this one are missing")
        if kind == Kind.GOODBYE:
            self._peers.lost_workers.channel_left(self._channel, cause)

    def _reserve(self, size: int) -> LimitExceeded | None:
        """Take the bytes of a large message that the peer announced, or return why it is refused."""
        channel = self._channel
        account = channel.account
        assert account is not None
        try:
            self._reserved = account.take_message(size, 0 if channel.outgoing else channel.unread())
        except LimitExceeded as error:
            reason = account.count_refusal(error, size)
            if reason:
                raise LimitExceeded(reason) from error
            return error
        return None

    def drop_reserved(self) -> None:
        """Give back what an unfinished message holds: the rest will not arrive."""
        reserved, self._reserved = self._reserved, None
        if reserved is not None:
            reserved.release()

    def _delivery_failed(self, frame: Frame, message: Message | None, error: Exception) -> None:
        """Report a message that this worker could not process. If that is impossible, give up the session."""
        channel = self._channel
        if not self._peers.undelivered(channel, frame, message, error):
            with self._lock:
                self._session.mark_lost(f"worker {self._local.me.name!r} could not process a message: {error!r}")
            if channel.link is not None:
                channel.link_ended(channel.link, "this worker could not process a message")

    def attach(self, link: Link, memory: SharedMemory | None) -> None:
        """Prepare to receive from a new link."""
        account, limits = self._channel.account, self._local.limits
        link.admit(limits if account is None else account.frame_limits(limits), self._place)
        if memory is not None:
            self._assembler.open_region = memory.open_region

    def _place(self, sequence: int, length: int) -> memoryview | None:
        """Return where the link should put the next chunk, or None if the chunk is a duplicate."""
        if sequence != self._session.received_up_to()[BULK] + 1:
            return None
        return self._assembler.destination(length)
