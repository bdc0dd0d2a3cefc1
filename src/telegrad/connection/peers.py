"""The other workers: who they are, and the channels with them, opened when first needed."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable
from typing import Protocol

import msgspec

from telegrad.connection.channel import Channel
from telegrad.connection.channel_owner import ChannelOwner
from telegrad.connection.handshake import NONCE_SIZE, Opener, Rejected
from telegrad.connection.worker_record import WorkerRecord, check_id, check_name
from telegrad.errors import (
    DeadlineExceeded,
    OtherVersion,
    ProtocolError,
    ResourceExhausted,
    UnknownWorker,
    WorkerLost,
    is_shortage,
)
from telegrad.interrupts import shielded
from telegrad.protocol.session_events import State
from telegrad.settings import AgentSettings
from telegrad.transport.base import Link, LinkClosed, Ready, Transport
from telegrad.transport.buffers import BufferPool
from telegrad.waiting import Event
from telegrad.wire.frames import Frame, Kind
from telegrad.wire.handshake_messages import HandshakeMessage, Hello, Proof, decode_handshake

_log = logging.getLogger("telegrad")


class Peer:
    """One other worker (or this one: it can call itself) in one of its lives."""

    def __init__(self, record: WorkerRecord) -> None:
        self.record = record
        self.gone = ""
        """Why it can no longer be called; empty while it can."""
        self.left = False
        """It is gone, but in order."""
        self.dying_until = 0.0
        """If it was lost: until then its process may be on its way out, and still listen."""
        self.lock = threading.Lock()  # protects outgoing, incoming and opening
        self.outgoing: Channel | None = None
        self.incoming: Channel | None = None
        self.opening: Event | None = None

    def channels(self) -> list[Channel]:
        """Those that exist."""
        return [channel for channel in (self.outgoing, self.incoming) if channel is not None]

    def traffic(self) -> tuple[int, int]:
        """Bytes of messages sent to it, and received from it."""
        channels = self.channels()
        return sum(channel.sent for channel in channels), sum(channel.received for channel in channels)


class PeersOwner(ChannelOwner, Protocol):
    """What the peers need of their agent."""

    me: WorkerRecord
    token: bytes | None
    settings: AgentSettings
    buffers: BufferPool

    def peer_lost(self, peer: Peer, reason: str) -> None:
        """A worker is gone."""


class Peers:
    """Finds workers by name or id, and opens and accepts connections."""

    def __init__(self, owner: PeersOwner, transports: Iterable[Transport]) -> None:
        self._owner = owner
        self._transports = {transport.scheme: transport for transport in transports}
        self.make_channel: type[Channel] = Channel
        """A subclass, where `telegrad.testing.faults` makes messages late or lost."""
        self.open = False
        """Whether workers may join: one that proves itself and is not known yet is taken up."""
        self._lock = threading.Lock()  # protects the two below
        self._by_name: dict[str, Peer] = {}
        self._by_id: dict[int, Peer] = {}
        self._greeted: list[Link] = []  # opened by us, and not through their handshake

    # -- who --------------------------------------------------------------------------------------------------

    def set_group(self, records: Iterable[WorkerRecord]) -> None:
        """The workers that there are."""
        with self._lock:
            for record in records:
                self._add(record)

    def _add(self, record: WorkerRecord) -> Peer:
        peer = Peer(record)
        self._by_name[record.name] = peer
        self._by_id[record.id] = peer
        return peer

    def find(self, to: str | int) -> Peer:
        """The worker of that name or id. An unknown one is an error that lists the known ones."""
        peer = self._by_name.get(to) if isinstance(to, str) else self._by_id.get(to)
        if peer is None:
            kind = "named" if isinstance(to, str) else "with id"
            known = ", ".join(f"{record.name!r} ({record.id})" for record in self.records())
            raise UnknownWorker(f"there is no worker {kind} {to!r}; the workers are {known}")
        return peer

    def records(self) -> list[WorkerRecord]:
        """All workers, by id."""
        with self._lock:
            return [self._by_id[worker].record for worker in sorted(self._by_id)]

    def all(self) -> list[Peer]:
        """All workers, by id."""
        with self._lock:
            return [self._by_id[worker] for worker in sorted(self._by_id)]

    def abandon(self) -> None:
        """Close the child's copies of all connections after a fork. No locks: one may be held there for ever."""
        links = list(self._greeted)
        for peer in list(self._by_id.values()):
            links += [channel.link for channel in peer.channels() if channel.link is not None]
        for link in links:
            link.abandon()

    def of(self, channel: Channel) -> Peer | None:
        """The worker that a channel belongs to, if it still does."""
        peer = self._by_name.get(channel.peer)
        return peer if peer is not None and channel in (peer.outgoing, peer.incoming) else None

    # -- opening ----------------------------------------------------------------------------------------------

    def channel_to(self, peer: Peer, deadline: float | None) -> Channel:
        """The channel on which `peer` is called. The first caller opens it, the others wait for that."""
        while True:
            channel = peer.outgoing
            if channel is not None:
                return channel
            with peer.lock:
                if peer.gone:
                    raise WorkerLost(f"worker {peer.record.name!r} is gone: {peer.gone}", worker=peer.record.name)
                if peer.outgoing is not None:
                    continue
                opening = peer.opening
                if opening is None:
                    peer.opening = self._owner.runtime.event()
            if opening is None:
                return self._open_first(peer, deadline)
            if not self._owner.executor.wait(opening, deadline):
                raise self._too_late(peer)

    def _open_first(self, peer: Peer, deadline: float | None) -> Channel:
        owner = self._owner
        channel: Channel | None = None
        try:
            transport, _ = self._way_to(peer.record)
            channel = self.make_channel(
                owner,
                peer.record,
                outgoing=True,
                resumable=transport.resumable,
                session_id=owner.runtime.random_bits(63),
                settings=owner.settings.session,
                allocate=owner.buffers.take,
            )
            while True:
                now = owner.runtime.now()
                if deadline is not None and now >= deadline:
                    raise self._too_late(peer)
                if peer.gone:
                    raise WorkerLost(f"worker {peer.record.name!r} is gone: {peer.gone}", worker=peer.record.name)
                with channel.lock:
                    channel.session.tick(now)
                    due = channel.session.next_tick()
                if self.connect(channel, peer, fresh=True):
                    break
                if channel.session.state is State.LOST:
                    reason = channel.session.lost_reason
                    raise WorkerLost(f"worker {peer.record.name!r} is lost: {reason}", worker=peer.record.name)
                with channel.lock:
                    due = channel.session.next_tick()
                pause = now + 0.1 if due is None else due
                owner.executor.wait(owner.runtime.event(), pause if deadline is None else min(pause, deadline))
            return channel
        except WorkerLost as error:
            owner.peer_lost(peer, str(error))
            raise
        finally:
            with peer.lock:
                if channel is not None and channel.link is not None and not peer.gone:
                    peer.outgoing = channel
                opening, peer.opening = peer.opening, None
            if opening is not None:
                opening.set()
            if channel is not None and peer.gone:
                channel.close(peer.gone)

    def connect(self, channel: Channel, peer: Peer, *, fresh: bool = False) -> bool:
        """Open a link for `channel`; False: it did not come about, and the session knows.

        A handshake that the peer refuses is raised: trying again would not help.
        """
        owner = self._owner
        transport, address = self._way_to(peer.record)
        deadline = owner.runtime.now() + owner.settings.connect_timeout
        owner.executor.block()
        try:
            link = transport.connect(address, deadline)
        except ConnectionRefusedError as error:
            channel.connect_failed(f"{address} refuses connections ({error})", refused=True)
            return False
        except Exception as error:
            if is_shortage(error):
                raise self._exhausted(peer, error) from error
            if not isinstance(error, OSError):
                raise
            channel.connect_failed(f"{address} cannot be reached ({error})", refused=False)
            return False
        finally:
            owner.executor.unblock()
        self._greeted.append(link)
        try:
            # What the system may refuse comes first: a peer that has let us in, and then sees the connection end, would
            # take us for dead.
            owner.poller.add(link, read=False, once=True)
            greet = self._greet if link.resumable else self._greet_to_the_end
            received = greet(link, channel, peer, deadline, fresh)
            channel.attach(link, received)
        except OtherVersion:
            link.close()
            raise
        except (LinkClosed, TimeoutError, ProtocolError) as error:
            link.close()
            channel.connect_failed(f"the handshake with {link.peer} broke off ({error})", refused=False)
            return False
        except BaseException as error:
            link.close()
            if is_shortage(error):
                raise self._exhausted(peer, error) from error
            raise
        finally:
            self._greeted.remove(link)
        return True

    @shielded
    def _greet_to_the_end(
        self, link: Link, channel: Channel, peer: Peer, deadline: float, fresh: bool
    ) -> tuple[int, int]:
        """Not broken off by an interrupt: to the other side, the end of a unix connection is that of this process."""
        return self._greet(link, channel, peer, deadline, fresh)

    def _greet(self, link: Link, channel: Channel, peer: Peer, deadline: float, fresh: bool) -> tuple[int, int]:
        owner = self._owner
        opener = Opener(
            owner.me,
            peer.record,
            owner.token,
            owner.runtime.random_bits(8 * NONCE_SIZE).to_bytes(NONCE_SIZE, "big"),
            session=channel.session_id,
            received=channel.session.received_up_to(),
            fresh=fresh,
        )
        send_greeting(link, opener.start())
        while True:
            ready = owner.executor.wait_for_link(link, deadline)
            if owner.runtime.now() >= deadline and not ready & Ready.READ:
                raise TimeoutError(f"no answer within {owner.settings.connect_timeout:g} s")
            try:
                for frame in link.receive():
                    answer = self._next_greeting(link, opener, frame)
                    if answer is not None:
                        return answer
            except Exception as error:
                # Nothing was read. To end here would not do: the peer may have let us in, and would take us for dead.
                if not is_shortage(error) or owner.runtime.now() >= deadline:
                    raise
                owner.executor.pause()

    def _next_greeting(self, link: Link, opener: Opener, frame: Frame) -> tuple[int, int] | None:
        try:
            answer = opener.take(decode_handshake(frame.body))
        except Rejected as error:
            send_greeting(link, error.greeting)
            raise
        if isinstance(answer, tuple):
            return answer
        send_greeting(link, answer)
        return None

    def _way_to(self, record: WorkerRecord) -> tuple[Transport, str]:
        """The best transport and address that both sides have."""
        here = self._owner.me.host
        for address in record.addresses:
            scheme = address.partition("://")[0]
            transport = self._transports.get(scheme)
            if transport is not None and (scheme != "unix" or record.host == here):
                return transport, address
        raise WorkerLost(
            f"worker {record.name!r} listens at {', '.join(record.addresses) or 'no address'}, none of which this "
            f"worker can reach with its transports ({', '.join(self._transports)})",
            worker=record.name,
        )

    def _exhausted(self, peer: Peer, error: BaseException) -> ResourceExhausted:
        return ResourceExhausted(
            f"worker {self._owner.me.name!r} is short of something, so it cannot open a connection to worker "
            f"{peer.record.name!r}: {error}. Free some, or raise its limit (ulimit -n for files): the next call "
            "connects again",
            worker=peer.record.name,
        )

    def _too_late(self, peer: Peer) -> DeadlineExceeded:
        return DeadlineExceeded(
            f"worker {peer.record.name!r} could not be connected to before the deadline", worker=peer.record.name
        )

    # -- letting in -------------------------------------------------------------------------------------------

    def check(self, hello: Hello, link: Link) -> None:
        """Look at who a proved opener says it is; a life of a worker that we do not know yet is taken up."""
        try:
            check_name(hello.name)
            check_id(hello.id)
        except ValueError as error:
            raise Rejected("name", str(error)) from error
        with self._lock:
            known = self._by_name.get(hello.name)
            if known is not None and known.record.id == hello.id and known.record.incarnation == hello.incarnation:
                if known.gone and not known.left:
                    raise Rejected("incarnation", f"this life of worker {hello.name!r} was given up: {known.gone}")
                return
            if self.open and known is None and hello.id not in self._by_id:
                host = "" if link.resumable else self._owner.me.host  # it came through a unix socket, or over tcp
                self._add(
                    WorkerRecord(hello.name, hello.id, hello.incarnation, hello.addresses, host=host, main=hello.main)
                )
                return
            if known is None or known.record.id != hello.id:
                raise Rejected("name", f"there is no worker {hello.name!r} with id {hello.id} in this group")
            if hello.name == self._owner.me.name:
                raise Rejected("name", f"worker {hello.name!r} is this worker")
            record = msgspec.structs.replace(
                known.record, incarnation=hello.incarnation, addresses=hello.addresses, main=hello.main
            )
            self._add(record)
        self._owner.peer_lost(known, "it was restarted")

    def resume(self, link: Link, hello: Hello, proof: Proof) -> tuple[int, int]:
        """What of the session that a proved opener names has arrived here."""
        owner = self._owner
        peer = self.find(hello.name)
        with peer.lock:
            channel = peer.incoming
        if channel is not None and channel.session_id == proof.session and not proof.fresh:
            return channel.detach("the peer opened a new connection")
        if not proof.fresh:
            raise Rejected("session", "the session is not known here any more")
        fresh = self.make_channel(
            owner,
            peer.record,
            outgoing=False,
            resumable=link.resumable,
            session_id=proof.session,
            settings=owner.settings.session,
            allocate=owner.buffers.take,
        )
        with peer.lock:
            peer.incoming = fresh
        if channel is not None:
            channel.close("the peer started a new session")
        return (0, 0)

    # -- the end ----------------------------------------------------------------------------------------------

    def remove_traces(self, record: WorkerRecord) -> bool:
        """Remove what a killed worker left on this host; False if it listens still."""
        if record.host != self._owner.me.host:
            return True
        gone = True
        for address in record.addresses:
            transport = self._transports.get(address.partition("://")[0])
            gone = (transport is None or transport.remove_dead(address)) and gone
        return gone


def send_greeting(link: Link, greeting: HandshakeMessage) -> None:
    """Send a message of the handshake."""
    link.send(Kind.HANDSHAKE, msgspec.msgpack.encode(greeting), 0, 0, 0)
