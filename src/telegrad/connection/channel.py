"""One calling direction between this worker and a peer: a session, and the link that currently carries it.

A worker calls a peer on its outgoing channel, and the replies come back there. It serves the peer on its incoming
channel. A session may outlive its link: over TCP it resumes on a new one.

The parts of a channel share its lock: `ReaderElection` decides who reads the link, `Receiver` reads it, `CreditWindow`
bounds the requests in progress, and `SessionDriver` runs the session's timers. This module sends, and replaces links.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from telegrad.connection.credit_window import CreditWindow
from telegrad.connection.local_worker import LocalWorker
from telegrad.connection.peer_account import PeerAccount
from telegrad.connection.placements import Placements
from telegrad.connection.reader_election import ReaderElection
from telegrad.connection.receiver import Receiver
from telegrad.connection.session_driver import SessionDriver
from telegrad.connection.worker_record import WorkerRecord
from telegrad.errors import TelegradError, is_shortage
from telegrad.events import CONNECTION
from telegrad.protocol.credits import Credits
from telegrad.protocol.limits import SessionSettings
from telegrad.protocol.session import Session
from telegrad.protocol.session_events import SessionEffect, SessionLost
from telegrad.transport.base import Link
from telegrad.transport.shared_memory import SharedMemory
from telegrad.wire.frames import CONTROL, MAX_CAUSE, MESSAGE, Kind, lane_of, pack_ping
from telegrad.wire.packing import OutgoingFrame, SharedRegion

if TYPE_CHECKING:
    from telegrad.calls.call import Call
    from telegrad.connection.peers import Peers

_log = logging.getLogger("telegrad")

_NONE = (0, 0)


class Channel:
    """One calling direction with a peer. `session_id` identifies the session to the peer."""

    def __init__(
        self,
        local: LocalWorker,
        peers: Peers,
        worker: WorkerRecord,
        *,
        outgoing: bool,
        resumable: bool,
        session_id: int,
        settings: SessionSettings,
        allocate: Callable[[int], memoryview],
    ) -> None:
        self.local = local
        self.peers = peers
        self.worker = worker
        """The peer, in the incarnation with which the session began."""
        self.peer = worker.name
        self.placements = Placements(local, worker)
        """Where tensors in messages to the peer go."""
        self.account = local.accounts.of(worker.name)
        """What the peer uses of this worker; None if it has no limits."""
        self.outgoing = outgoing
        self.resumable = resumable
        self.session_id = session_id
        self._allocate = allocate
        self.calls: dict[int, Call] = {}
        self.abandoned: dict[int, int] = {}
        """Calls that were given up, with the credits that their replies will return."""
        # Protects session, credits, link, sent and abandoned, and the state of the parts below.
        self.lock = threading.Lock()
        self.link: Link | None = None
        self.memory: SharedMemory | None = None
        """The memory that both ends of the link share, if they are on one host."""
        self.links = 0  # that have carried the session
        self.sent = 0
        """Bytes of messages sent, over the link or in shared memory."""
        self.session = Session(
            resumable=resumable,
            initiator=outgoing,
            settings=settings,
            now=local.runtime.now(),
            worker=self.peer,
        )
        self.credits = Credits(settings, f"worker {self.peer!r}")
        self.credit_window = CreditWindow(self.credits, self.lock)
        self.readers = ReaderElection(self)
        self.receiver = Receiver(self, allocate)
        self.driver = SessionDriver(self)

    # -- sending ----------------------------------------------------------------------------------------------

    def room(self, size: int) -> memoryview | SharedRegion:
        """Return a buffer for the contents of a large message: shared memory if possible, else private memory."""
        memory = self.memory
        region = memory.allocate(size) if memory is not None else None
        return self._allocate(size) if region is None else region

    def post(self, frames: Sequence[OutgoingFrame], charge: int = 0, *, unwaited: bool = False) -> int | None:
        """Send the frames of one message, and return their bytes. Raises WorkerLost if the peer is gone.

        `charge` is the size of a request that needs credits, else 0. Without credits it sends nothing and returns None.
        `unwaited` marks a request whose reply no thread waits for.
        """
        sequenced, failed, total = 0, None, 0
        if self.account is not None and not self.outgoing:
            self._check_unread(self.account)
        with self.lock:
            session, link, memory = self.session, self.link, self.memory
            if charge and not self.credits.acquire(charge):
                return None
            try:
                for frame in frames:
                    kind, body, region = frame
                    size = len(body)
                    sequence = session.send(CONTROL if kind == MESSAGE else lane_of(kind), frame, size)
                    sequenced += 1
                    total += size if region is None else frame.size  # the region may be larger than the message
                    if link is None:
                        continue
                    if memory is None:
                        link.send(kind, body, sequence, *session.acks())
                    else:
                        if region is not None:
                            memory.mark_sent(region)
                        releases = memory.take_releases() if memory.unreferenced else _NONE
                        link.send(kind, body, sequence, *releases)
            except BaseException as error:
                if not sequenced or isinstance(error, TelegradError):
                    raise
                failed = error
                total += self._sequence_rest(frames[sequenced:])
            self.sent += total
            if unwaited:
                readers = self.readers
                readers.unwaited += 1
                if not readers.reading and not readers.armed:
                    readers.arm_poller()
        if failed is not None:
            self.interrupted(link, "sending", failed)
            if not is_shortage(failed) or session.state.is_over:
                raise failed
        return total

    def unread(self) -> int:
        """Return the bytes that were sent and that the peer has not read, as far as this worker knows."""
        return max(self.session.unacked_bytes, 0 if (link := self.link) is None else link.unsent_bytes())

    def _check_unread(self, account: PeerAccount) -> None:
        unread = self.unread()
        if account.is_stuck(unread) and not self.session.state.is_over:
            self.give_up(account.unread_reason(unread))

    def give_up(self, reason: str) -> None:
        """Disconnect a peer that misuses this worker."""
        with self.lock:
            self.session.mark_lost(reason)
        self.peers.lost_workers.channel_lost(self, reason)

    def _sequence_rest(self, frames: Sequence[OutgoingFrame]) -> int:
        """Queue the rest of a message whose sending was interrupted, to be sent over the next link. Returns its bytes.

        Without it, the next message would begin in the middle of this one. Call with the lock held.
        """
        try:
            for frame in frames:
                self.session.send(lane_of(frame.kind), frame, len(frame.body))
        except MemoryError as error:
            self.session.mark_lost(f"this worker has no memory to send the rest of a message: {error!r}")
        return sum(frame.size for frame in frames)

    # -- links ------------------------------------------------------------------------------------------------

    def attach(self, link: Link, peer_received: tuple[int, int]) -> None:
        """Continue the session over `link`, whose handshake is done."""
        memory = SharedMemory(self.local.slabs, link) if link.shares_memory else None
        self.receiver.attach(link, memory)
        _record(self, "resumed" if self.links else "opened" if self.outgoing else "accepted")
        self.links += 1
        with self.lock:
            unacknowledged = self.session.connected(peer_received, self.local.runtime.now())
            self.link, self.memory, link.owner = link, memory, self.receiver
            for _, sequence, frame in unacknowledged:
                assert isinstance(frame, OutgoingFrame)
                link.send(frame.kind, frame.body, sequence, *self.session.acks())
            self.readers.add_to_poller(link)
        self.driver.schedule()

    def detach(self, reason: str) -> tuple[int, int]:
        """Give up the current link because the peer opens a new one, and return what has been received."""
        with self.lock:
            link, self.link = self.link, None
            effects = self.session.disconnected(reason, self.local.runtime.now()) if link is not None else []
            received = self.session.received_up_to()
        if link is not None:
            self._close(link)
        self.driver.apply(effects)
        return received

    def link_ended(self, link: Link, reason: str, *, by_peer: bool = False) -> None:
        """Handle the end of `link`, whichever side caused it; `by_peer` if it was the peer, or the network."""
        with self.lock:
            ended = self.link is link
            effects: list[SessionEffect] = []
            lost = None
            if ended:
                self.link = None
                self.readers.armed = False
                effects = self.session.disconnected(reason, self.local.runtime.now())
                lost = self.session.lost_reason
        if ended:
            _record(self, "broke", reason)
        if lost is not None and by_peer and _is_unused(self):
            self.peers.drop_unused(self, lost)
        elif lost is not None:
            # Before the link is closed: the peer then closes the connection on which it calls us, and the end of that
            # one would be reported as the cause.
            self.peers.lost_workers.channel_lost(self, lost)
        self._close(link)
        if ended:
            self.driver.apply([effect for effect in effects if not isinstance(effect, SessionLost)])
            self.driver.schedule()

    def interrupted(self, link: Link | None, action: str, error: BaseException) -> None:
        """Close a link whose stream is out of sync because an exception interrupted a message.

        The exception is a resource shortage, or came from a signal handler that `telegrad.rpc.signals` has not
        wrapped. A resumable session continues over another link. Any other is lost.
        """
        if link is not None:
            reason = f"{type(error).__name__} on this worker, in the middle of {action}"
            _log.warning(
                "closed the connection with worker %r: %s. If a signal handler raised it, install the handler before "
                "init_rpc, or with telegrad.rpc.wrap_signal_handler",
                self.peer,
                reason,
            )
            self.link_ended(link, reason)

    def cut(self, reason: str) -> None:
        """Close the link, which the session has already given up."""
        _log.info("cut the connection with worker %r: %s", self.peer, reason)
        with self.lock:
            link, self.link, self.readers.armed = self.link, None, False
        if link is not None:
            self._close(link)

    def _close(self, link: Link) -> None:
        link.close()
        memory = self.memory
        if memory is not None:  # a channel with shared memory has only one link in its life
            memory.close()

    def connect_failed(self, reason: str, *, refused: bool) -> None:
        """Handle a failed attempt to open a link."""
        with self.lock:
            now = self.local.runtime.now()
            effects = self.session.refused(reason, now) if refused else self.session.disconnected(reason, now)
        self.driver.apply(effects)
        self.driver.schedule()

    # -- shutdown ---------------------------------------------------------------------------------------------

    def say_goodbye(self, cause: str) -> None:
        """Tell the peer that nothing more will be sent. `cause` is the error that ends this worker, if one does."""
        with self.lock:
            if self.session.say_goodbye(self.local.runtime.now()) and self.link is not None:
                body = pack_ping(*self.session.sent_up_to()) + cause.encode(errors="replace")[:MAX_CAUSE]
                self.link.send(Kind.GOODBYE, body, 0, *self.session.acks())

    def close(self, reason: str) -> None:
        """Give up the session and the link, and wake all threads that wait for them."""
        with self.lock:
            if not self.session.state.is_over:
                self.session.mark_lost(reason)
            link, self.link = self.link, None
            self.driver.stop()
            waiters, followers = self.credit_window.release_waiters(), self.readers.release_followers()
        self.receiver.drop_reserved()
        if link is not None:
            self._close(link)
        for wake in waiters:
            wake()
        for reader in followers:
            if reader.event is not None:
                reader.event.set()


def _is_unused(channel: Channel) -> bool:
    """Return whether the peer has opened a channel, over a unix socket, and has sent nothing on it.

    Its end says nothing: the peer may have given up the handshake before this worker, stopped or busy, admitted it.
    """
    received = channel.session.received_up_to()
    return not channel.outgoing and not channel.resumable and received == _NONE and not channel.sent


def _record(channel: Channel, what: str, reason: str = "") -> None:
    now, ring = channel.local.runtime.now(), channel.local.events
    ring.record(CONNECTION, now, now, channel.session_id, peer=channel.peer, what=what, outcome=reason)
