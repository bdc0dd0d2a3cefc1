"""The registry of workers: who belongs to the group, and the channels with each of them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable

from telegrad.connection.channel import Channel
from telegrad.connection.connector import Connector, Opening
from telegrad.connection.handshake import Rejected
from telegrad.connection.local_worker import LocalWorker, session_settings
from telegrad.connection.lost_workers import LostWorkers
from telegrad.connection.members import Members, identity_of
from telegrad.connection.worker_record import WorkerRecord, check_id, check_name
from telegrad.errors import TelegradError, UnknownWorker
from telegrad.protocol.membership import Admission, NotAdmitted
from telegrad.transport.base import Link, LinkClosed, Transport
from telegrad.wire.frames import Frame, Message
from telegrad.wire.handshake_messages import Hello, Purpose

_log = logging.getLogger("telegrad")


def _record_of(hello: Hello) -> WorkerRecord:
    return WorkerRecord(
        hello.name,
        hello.id,
        hello.incarnation,
        hello.addresses,
        generation=hello.generation,
        host=hello.host,
        main=hello.main,
        tls=hello.tls,
        accept=hello.accept,
        devices=hello.devices,
    )


class Peer:
    """One incarnation of a worker. This worker is its own peer, too, since it can call itself."""

    def __init__(self, record: WorkerRecord) -> None:
        self.record = record
        self.gone = ""
        """Why the worker can no longer be called. Empty while it can."""
        self.left = False
        """Whether the worker is gone after an orderly shutdown."""
        self.failed_at: float | None = None
        """When the worker was lost, or ended with an error; None if neither has happened."""
        self.dying_until = 0.0
        """If the worker was lost: until when its process may still be exiting, and listening."""
        self.lock = threading.Lock()  # protects outgoing, incoming, opening and last_attempt
        self.outgoing: Channel | None = None
        self.incoming: Channel | None = None
        self.opening: Opening | None = None
        self.last_attempt = 0
        """The number of the last connection that the worker opened to this one (`Hello.attempt`)."""

    def channels(self) -> list[Channel]:
        """Return the channels that exist."""
        return [channel for channel in (self.outgoing, self.incoming) if channel is not None]

    def traffic(self) -> tuple[int, int]:
        """Return the bytes of messages sent to and received from the worker."""
        channels = self.channels()
        return sum(channel.sent for channel in channels), sum(channel.receiver.received for channel in channels)


class Peers:
    """The workers of the group, by name and id."""

    def __init__(self, local: LocalWorker, transports: Iterable[Transport]) -> None:
        self._local = local
        self._transports = {transport.scheme: transport for transport in transports}
        self.make_channel: type[Channel] = Channel
        """Replaced by a subclass where `telegrad.testing.faults` delays or drops messages."""
        self.connector = Connector(local, self, self._transports)
        self.lost_workers = LostWorkers(local, self)
        self.deliver: Callable[[Channel, Message], None]
        """Takes the messages that arrive on the channels; set by the agent, as is the next."""
        self.undelivered: Callable[[Channel, Frame, Message | None, Exception], bool]
        """Reports a message that this worker cannot take; False if nobody can be told."""
        self.members = Members(local)
        self._lock = threading.Lock()  # protects the two below
        self._by_name: dict[str, Peer] = {}
        self._by_id: dict[int, Peer] = {}

    def set_group(self, records: Iterable[WorkerRecord], *, is_open: bool = False) -> None:
        """Add the workers of the group; `is_open` says that others may join it later."""
        records = list(records)
        self.members.form(records, is_open=is_open)
        with self._lock:
            for record in records:
                self._add(record)

    def learn(self, record: WorkerRecord) -> bool:
        """Take over what another member says about a worker. Returns whether that was new."""
        if not self.members.learn(record):
            return False
        self._register(record)
        return True

    def _register(self, record: WorkerRecord) -> None:
        """Add a worker, in place of an incarnation that it replaces."""
        with self._lock:
            before = self._by_name.get(record.name)
            self._add(record)
        if before is not None:
            self.lost_workers.peer_lost(before, "it was restarted")
        self.members.announce(record.name)

    def _add(self, record: WorkerRecord) -> Peer:
        peer = Peer(record)
        self._by_name[record.name] = peer
        self._by_id[record.id] = peer
        return peer

    def find(self, to: str | int) -> Peer:
        """Return the worker with that name or id. Raises an UnknownWorker that lists the known ones."""
        peer = self._by_name.get(to) if isinstance(to, str) else self._by_id.get(to)
        if peer is None:
            kind = "named" if isinstance(to, str) else "with id"
            known = ", ".join(f"{record.name!r} ({record.id})" for record in self.records())
            raise UnknownWorker(f"there is no worker {kind} {to!r}; the workers are {known}")
        return peer

    def records(self) -> list[WorkerRecord]:
        """Return the records of all workers, sorted by id."""
        with self._lock:
            return [self._by_id[worker].record for worker in sorted(self._by_id)]

    def all(self) -> list[Peer]:
        """Return all workers, sorted by id."""
        with self._lock:
            return [self._by_id[worker] for worker in sorted(self._by_id)]

    def abandon(self) -> None:
        """Close a forked child's copies of all connections. Takes no locks: the parent may have held one."""
        links: list[Link] = list(self.connector.dialer.connecting)
        for peer in list(self._by_id.values()):
            links += [channel.link for channel in peer.channels() if channel.link is not None]
        for link in links:
            link.abandon()

    def of(self, channel: Channel) -> Peer | None:
        """Return the worker that `channel` belongs to. None if the channel was replaced."""
        peer = self._by_name.get(channel.peer)
        return peer if peer is not None and channel in (peer.outgoing, peer.incoming) else None

    # -- incoming connections ---------------------------------------------------------------------------------

    def known_generation(self, hello: Hello) -> int:
        """Return the highest generation in which others of the opener's name are known; -1 if there is none."""
        return self.members.known_generation(identity_of(hello))

    def check(self, hello: Hello) -> None:
        """Check the identity of an authenticated opener, and register a new incarnation of a worker.

        A worker that a launcher has started again takes the place of one that still seems alive: it need not wait until
        every other one has noticed its death. So a member that claims a later generation of another takes its place. A
        shared token cannot prevent that, because all who know it are equal; certificates can (see
        `telegrad.connection.handshake`).
        """
        try:
            check_name(hello.name)
            check_id(hello.id)
        except ValueError as error:
            raise Rejected("name", str(error)) from error
        if hello.purpose is not Purpose.SESSION:
            self._check_question(hello)
            return
        try:
            admission = self.members.admit(identity_of(hello))
        except NotAdmitted as error:
            raise Rejected(error.code, str(error)) from error
        if admission is not Admission.KNOWN:
            self._register(_record_of(hello))
            return
        known = self.find(hello.name)
        if known.gone and not known.left:
            raise Rejected("incarnation", f"this incarnation of worker {hello.name!r} was given up: {known.gone}")

    def _check_question(self, hello: Hello) -> None:
        """Answer an opener that wants a vote, or to know whether this worker is there and stays."""
        local = self._local
        if local.departing or local.closed:
            raise Rejected("leaving", f"worker {local.name!r} is leaving the group")
        if hello.purpose is Purpose.VOTE:
            if not self.members.may_vote:
                raise Rejected("abstains", "it was replaced itself, and has not heard how a quorum has voted")
            reason = self.members.vote(identity_of(hello))
            if reason:
                self._verify(hello.name)
                raise Rejected("vote", reason)

    def _verify(self, name: str) -> None:
        """Connect to a worker that another wants to replace: without a connection, nobody here notices its death."""
        peer = self._by_name.get(name)
        if peer is None or peer.gone or peer.channels() or peer.opening is not None:
            return

        def connect() -> None:
            try:
                self.connector.channel_to(peer, self._local.runtime.now() + self._local.settings.connect_timeout)
            except TelegradError as error:  # if it is lost, those who need it have been told
                _log.debug("cannot connect to worker %r, which another wants to replace: %s", name, error)

        self._local.executor.submit(connect)

    def resume(self, link: Link, hello: Hello) -> tuple[int, int]:
        """Return what has been received of the session that an authenticated opener wants to resume or start.

        Raises LinkClosed if the opener has opened another connection since, and Rejected if the session is unknown.
        """
        local = self._local
        peer = self.find(hello.name)
        with peer.lock:
            if hello.attempt <= peer.last_attempt:
                # Not a Rejected, which would be sent: whoever still holds this connection is not the opener.
                raise LinkClosed("the opener gave it up, and has opened another connection since")
            peer.last_attempt = hello.attempt
            channel = peer.incoming
        if channel is not None and channel.session_id == hello.session and not hello.fresh:
            return channel.detach("the peer opened a new connection")
        if not hello.fresh:
            raise Rejected("session", "the session is not known here any more")
        fresh = self.make_channel(
            local,
            self,
            peer.record,
            outgoing=False,
            resumable=link.resumable,
            session_id=hello.session,
            settings=session_settings(local, peer.record.name),
            allocate=local.buffers.take,
        )
        with peer.lock:
            peer.incoming = fresh
        if channel is not None:
            channel.close("the peer started a new session")
        return (0, 0)

    def remove_traces(self, record: WorkerRecord) -> bool:
        """Remove the sockets that a killed worker left on this host. Returns False if it still listens."""
        if record.host != self._local.me.host:
            return True
        gone = True
        for address in record.addresses:
            transport = self._transports.get(address.partition("://")[0])
            gone = (transport is None or transport.remove_dead(address)) and gone
        return gone
