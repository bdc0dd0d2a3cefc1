"""The registry of workers: who belongs to the group, and the channels with each of them."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, cast

import msgspec

from telegrad.connection.channel import Channel
from telegrad.connection.connector import Connector
from telegrad.connection.handshake import Rejected
from telegrad.connection.local_worker import LocalWorker, session_settings
from telegrad.connection.lost_workers import LostWorkers
from telegrad.connection.members import Members, identity_of
from telegrad.connection.packed_group import PackedGroup
from telegrad.connection.peer_table import Peer, PeerTable
from telegrad.connection.relaying import Relaying
from telegrad.connection.worker_record import WorkerRecord, check_record
from telegrad.errors import TelegradError, UnknownWorker
from telegrad.events import MEMBER
from telegrad.protocol.membership import Admission, NotAdmitted, State
from telegrad.transport.addresses import observe_address
from telegrad.transport.base import Link, LinkClosed, Transport
from telegrad.wire.frames import Frame, Message
from telegrad.wire.handshake_messages import Description, Hello, Purpose

if TYPE_CHECKING:
    from telegrad.transport.relay import RelayTransport

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


class Peers:
    """The workers of the group, by name and id."""

    def __init__(self, local: LocalWorker, transports: Iterable[Transport]) -> None:
        self._local = local
        self._transports = {transport.scheme: transport for transport in transports}
        self.make_channel: type[Channel] = Channel
        """Replaced by a subclass where `telegrad.testing.faults` delays or drops messages."""
        self.connector = Connector(local, self, self._transports)
        self.lost_workers = LostWorkers(local, self)
        relay = self._transports.get("relay")
        self.relaying = Relaying(local, self, cast("RelayTransport | None", relay))
        self.deliver: Callable[[Channel, Message], None]
        """Takes the messages that arrive on the channels; set by the agent, as is the next."""
        self.undelivered: Callable[[Channel, Frame, Message | None, Exception], bool]
        """Reports a message that this worker cannot take; False if nobody can be told."""
        self.observers: Callable[[Link], None] | None = None  # takes their connections; None: they are refused
        self.on_abstention: Callable[[], None]
        """Called on a runner when this worker was asked for a vote and does not know enough to vote; set as above."""
        self.members = Members(local)
        self.changes = 0  # how often a worker was added, replaced or lost: until then, what is derived from all holds
        self.table = PeerTable()

    def set_group(self, records: Iterable[WorkerRecord], *, is_open: bool = False) -> None:
        """Add the workers of the group; `is_open` says that others may join it later."""
        records = records if isinstance(records, PackedGroup) and not is_open else list(records)
        self.members.form(records, is_open=is_open)
        self.table.fill(records)
        self.changes += 1

    def join_group(self, records: Iterable[WorkerRecord]) -> None:
        """Add the workers of a group that this worker joins, except those that have connected to it meanwhile."""
        for record in records:
            self.learn(record)  # the membership has most of them already
            with self.table.lock:
                member = self.members.find(record.name)
                is_latest = member is None or member.identity.incarnation == record.incarnation
                if is_latest and record.name not in self.table.by_name:
                    self._add(record)

    def learn(self, record: WorkerRecord) -> bool:
        """Take over what another member says about a worker. Returns whether that was new."""
        if self._take(record, partial(self.members.learn, record)) is not Admission.KNOWN:
            return True
        self._update(record)
        return False

    def _update(self, record: WorkerRecord) -> None:
        """Take over the generation that an incarnation has got since it was registered, if the membership has."""
        peer, member = self.table.get(record.name), self.members.find(record.name)
        if peer is not None and member is not None and member.identity == identity_of(record):
            with peer.lock:
                if peer.record.incarnation == record.incarnation and peer.record.generation < record.generation:
                    peer.record = record
                    self.changes += 1

    def _take(self, record: WorkerRecord, admit: Callable[[], Admission]) -> Admission:
        """Add a worker if the membership admits it, in place of an incarnation that is lost or has left."""
        while True:
            with self.table.lock:  # the membership and the table name the same incarnation
                admission = admit()
                is_new = admission in (Admission.JOINED, Admission.REPLACES)
                before = self.table.get(record.name)
                if is_new:
                    self._add(record)
            if admission is not Admission.DISPLACES:
                break
            self.lost_workers.displace(record.name)
        if is_new:
            _record_member(self._local, record, "joined" if before is None else "replaced")
            self.members.announce(record.name)
            self.relaying.refresh()
        return admission

    def _add(self, record: WorkerRecord) -> None:
        self.table.add(record)
        self.changes += 1

    def find(self, to: str | int) -> Peer:
        """Return the worker with that name or id. Raises an UnknownWorker that lists the known ones."""
        table = self.table
        peer = table.by_name.get(to) if isinstance(to, str) else table.by_id.get(to)
        if peer is None:
            if not isinstance(to, (str, int)):
                raise TypeError(f"a worker is given by its name, its id or its WorkerInfo, not by {to!r}")
            peer = table.get(to)
        if peer is None:
            raise _unknown(to, self.records())
        return peer

    def records(self) -> list[WorkerRecord]:
        """Return the records of all workers, sorted by id."""
        return [peer.record for peer in self.all()]

    def all(self) -> list[Peer]:
        """Return all workers, sorted by id. The list is not to be changed.

        In a large group, this decodes the records of all for the first time. See `PeerTable.used` and `PeerTable.at`.
        """
        return self.table.all()

    def abandon(self) -> None:
        """Close a forked child's copies of all connections. Takes no locks: the parent may have held one."""
        self.relaying.abandon()
        links: list[Link] = list(self.connector.dialer.connecting)
        for peer in list(self.table.by_id.values()):
            links += [channel.link for channel in peer.channels() if channel.link is not None]
        for link in links:
            link.abandon()

    def of(self, channel: Channel) -> Peer | None:
        """Return the worker that `channel` belongs to. None if the channel was replaced."""
        peer = self.table.by_name.get(channel.peer)
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
        record = _record_of(hello)
        try:
            check_record(record)
        except ValueError as error:
            raise Rejected("name", str(error)) from error
        if hello.purpose is not Purpose.SESSION:
            _check_question(self, hello)
            return
        try:
            admission = self._take(record, partial(self.members.admit, identity_of(hello)))
        except NotAdmitted as error:
            raise Rejected(error.code, str(error)) from error
        if admission is not Admission.KNOWN:
            _log.info("worker %r: worker %r has joined the group (%s)", self._local.name, record.name, admission.name)
            return
        self._update(_record_of(hello))
        known = self.find(hello.name)
        if known.gone and not known.left:
            # If this worker is the one that was lost, and so has lost the others, they need not end because of it.
            code = "incarnation" if self._local.given_up is None else "session"
            raise Rejected(code, f"this incarnation of worker {hello.name!r} was given up: {known.gone}")

    def verify(self, name: str) -> None:
        """Connect to a worker that another wants to replace: without a connection, nobody here notices its death."""
        peer = self.table.get(name)
        if peer is None or peer.record.name == self._local.name or peer.gone or peer.channels() or peer.opening:
            return

        def connect() -> None:
            # As long as a session tries: only then is a worker that cannot be reached lost.
            patience = 2 * (self._local.settings.session.resume_limit + self._local.settings.connect_timeout)
            try:
                self.connector.channel_to(peer, self._local.runtime.now() + patience)
            except TelegradError as error:  # if it is lost, those who need it have been told
                _log.debug("cannot connect to worker %r, which another wants to replace: %s", name, error)

        self._local.executor.submit(connect)

    def drop_unused(self, channel: Channel, reason: str) -> None:
        """Forget a channel that its opener never used, and see whether the opener is alive."""
        peer = self.table.by_name.get(channel.peer)
        if peer is not None:
            with peer.lock:
                if peer.incoming is channel:
                    peer.incoming = None
        channel.close(reason)
        self._keep_verifying(channel.peer)

    def _keep_verifying(self, name: str) -> None:
        """Verify a worker until there is a connection to it, or it is lost: values may wait for one or the other."""
        peer = self.table.get(name)
        if self._local.closed or peer is None or peer.gone or peer.channels():
            return
        self.verify(name)
        again = self._local.runtime.now() + self._local.settings.session.resume_limit
        self._local.executor.timers.at(again, lambda: self._keep_verifying(name))

    def describe(self, member: int) -> Description:
        """Describe the member with this id, or the next, to a newcomer."""
        peer = self.table.next(member)
        is_open = self.members.is_open
        if peer is None:
            return Description(b"", State.ALIVE, is_open, b"")
        known = self.members.find(peer.record.name)
        state = State.ALIVE if known is None else known.state
        return Description(msgspec.msgpack.encode(peer.record), state, is_open, b"")

    def resume(self, link: Link, hello: Hello) -> tuple[int, int]:
        """Return what has been received of the session that an authenticated opener wants to resume or start.

        Raises LinkClosed if the opener has opened another connection since, and Rejected if the session is unknown.
        """
        local = self._local
        peer = self.find(hello.name)
        if peer.record.incarnation != hello.incarnation:  # since it was admitted
            raise Rejected("incarnation", f"this incarnation of worker {hello.name!r} was replaced by a later one")
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
        _take_in(peer, fresh)
        if channel is not None:
            channel.close("the peer started a new session")
        return (0, 0)

    def remove_traces(self, record: WorkerRecord) -> bool:
        """Remove the sockets that a killed worker left on this host. Returns False if it still listens."""
        me = self._local.me
        if record.host != me.host:
            return True
        gone = True
        # A member could announce the socket of another program. Those of workers of this host are in one directory.
        directories = {address.rpartition("/")[0] for address in me.addresses}
        for address in record.addresses:
            if address.rpartition("/")[0] not in directories:
                continue
            transport = self._transports.get(address.partition("://")[0])
            if transport is not None:
                left = (address, observe_address(address)) if address.startswith("unix://") else (address,)
                gone = sum(transport.remove_dead(each) for each in left) == len(left) and gone
        return gone


def _take_in(peer: Peer, channel: Channel) -> None:
    """Use the channel that a worker has opened, unless the worker was lost since it was checked."""
    with peer.lock:
        gone = "" if peer.left else peer.gone
        if not gone:
            peer.incoming = channel
    if gone:  # nobody would tell the channel
        channel.close(gone)
        raise Rejected("incarnation", f"this incarnation of worker {peer.record.name!r} was given up: {gone}")


def _unknown(to: str | int, records: list[WorkerRecord]) -> UnknownWorker:
    """Return the error for a worker that does not exist. It lists those that do, and the one that may be meant."""
    kind = "named" if isinstance(to, str) else "with id"
    known = ", ".join(f"{record.name!r} ({record.id})" for record in records)
    close = difflib.get_close_matches(to, [record.name for record in records], n=1) if isinstance(to, str) else []
    meant = f". Did you mean {close[0]!r}?" if close else ""
    return UnknownWorker(f"there is no worker {kind} {to!r}; the workers are {known}{meant}")


def _record_member(local: LocalWorker, record: WorkerRecord, what: str) -> None:
    now = local.runtime.now()
    local.events.record(MEMBER, now, now, record.id, peer=record.name, what=what)


def _check_question(peers: Peers, hello: Hello) -> None:
    """Answer an opener that wants a vote, or to know whether this worker is there and stays."""
    local = peers._local
    if local.departing or local.closed:
        raise Rejected("leaving", f"worker {local.name!r} is leaving the group")
    if hello.purpose is Purpose.OBSERVE and peers.observers is None:
        raise Rejected("observe", f"worker {local.name!r} does not let others look at it through the network")
    known = None if hello.purpose is Purpose.OBSERVE else peers.members.find(hello.name)
    if known is not None and known.identity.incarnation != hello.incarnation:
        peers.verify(hello.name)  # a newcomer that looks for its group will ask for votes next
    if hello.purpose is Purpose.VOTE:
        if not peers.members.may_vote:
            local.executor.submit(peers.on_abstention)
            raise Rejected("abstains", "it was replaced itself, and has not heard how a quorum has voted")
        reason = peers.members.vote(identity_of(hello))
        if reason:
            raise Rejected("vote", reason)
