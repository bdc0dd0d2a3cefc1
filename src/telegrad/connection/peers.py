"""The registry of workers: who belongs to the group, and the channels with each of them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

from telegrad.connection.channel import Channel
from telegrad.connection.connector import Connector, Opening
from telegrad.connection.handshake import Rejected
from telegrad.connection.local_worker import LocalWorker
from telegrad.connection.lost_workers import LostWorkers
from telegrad.connection.worker_record import WorkerRecord, check_id, check_name
from telegrad.errors import UnknownWorker
from telegrad.transport.base import Link, LinkClosed, Transport
from telegrad.wire.frames import Frame, Message
from telegrad.wire.handshake_messages import Hello

_MAX_PREDECESSORS = 64  # incarnations of a worker that are remembered: more than any worker is restarted in a minute


def _record_of(hello: Hello) -> WorkerRecord:
    return WorkerRecord(
        hello.name,
        hello.id,
        hello.incarnation,
        hello.addresses,
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
        self.dying_until = 0.0
        """If the worker was lost: until when its process may still be exiting, and listening."""
        self.predecessors: tuple[int, ...] = ()
        """The incarnations that this one and those before it replaced."""
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
        self.allow_join = False
        """Whether unknown workers that know the group token may join."""
        self.connector = Connector(local, self, self._transports)
        self.lost_workers = LostWorkers(local, self)
        self.deliver: Callable[[Channel, Message], None]
        """Takes the messages that arrive on the channels; set by the agent, as is the next."""
        self.undelivered: Callable[[Channel, Frame, Message | None, Exception], bool]
        """Reports a message that this worker cannot take; False if nobody can be told."""
        self._lock = threading.Lock()  # protects the two below
        self._by_name: dict[str, Peer] = {}
        self._by_id: dict[int, Peer] = {}

    def set_group(self, records: Iterable[WorkerRecord]) -> None:
        """Add the workers of the group."""
        with self._lock:
            for record in records:
                self._add(record)

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
        links: list[Link] = list(self.connector.connecting)
        for peer in list(self._by_id.values()):
            links += [channel.link for channel in peer.channels() if channel.link is not None]
        for link in links:
            link.abandon()

    def of(self, channel: Channel) -> Peer | None:
        """Return the worker that `channel` belongs to. None if the channel was replaced."""
        peer = self._by_name.get(channel.peer)
        return peer if peer is not None and channel in (peer.outgoing, peer.incoming) else None

    # -- incoming connections ---------------------------------------------------------------------------------

    def check(self, hello: Hello) -> None:
        """Check the identity of an authenticated opener, and register a new incarnation of a worker.

        A new incarnation takes the place of one that still seems alive: a worker that was restarted must not have to
        wait until every other one has noticed its death. So a member that claims to be a new incarnation of another
        takes its place. A shared token cannot prevent that, because all who know it are equal; certificates can (see
        `telegrad.connection.handshake`). An incarnation that was replaced never returns, so two processes that both
        run as one worker cannot replace each other in turn.
        """
        try:
            check_name(hello.name)
            check_id(hello.id)
        except ValueError as error:
            raise Rejected("name", str(error)) from error
        with self._lock:
            known = self._by_name.get(hello.name)
            if known is not None and known.record.id == hello.id and known.record.incarnation == hello.incarnation:
                if known.gone and not known.left:
                    raise Rejected(
                        "incarnation", f"this incarnation of worker {hello.name!r} was given up: {known.gone}"
                    )
                return
            if self.allow_join and known is None and hello.id not in self._by_id:
                self._add(_record_of(hello))
                return
            if known is None or known.record.id != hello.id:
                raise Rejected("name", f"there is no worker {hello.name!r} with id {hello.id} in this group")
            if hello.name == self._local.me.name:
                raise Rejected("name", f"worker {hello.name!r} is this worker")
            if hello.incarnation in known.predecessors:
                raise Rejected(
                    "incarnation", f"this incarnation of worker {hello.name!r} was replaced by a later one: restart it"
                )
            predecessors = (*known.predecessors, known.record.incarnation)
            self._add(_record_of(hello)).predecessors = predecessors[-_MAX_PREDECESSORS:]
        self.lost_workers.peer_lost(known, "it was restarted")

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
            settings=local.settings.session,
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
