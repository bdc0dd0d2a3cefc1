"""Opens connections to other workers: one outgoing channel per peer, connected when first needed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import msgspec

from telegrad.connection.channel import Channel
from telegrad.connection.handshake import NONCE_SIZE, Opener, Rejected
from telegrad.connection.local_worker import LocalWorker
from telegrad.connection.worker_record import WorkerRecord
from telegrad.errors import (
    DeadlineExceeded,
    OtherVersion,
    ProtocolError,
    ResourceExhausted,
    WorkerLost,
    is_shortage,
)
from telegrad.interrupts import shielded
from telegrad.protocol.session_events import SessionState
from telegrad.transport.base import Link, LinkClosed, Ready, Transport
from telegrad.wire.frames import Frame, Kind
from telegrad.wire.handshake_messages import HandshakeMessage, decode_handshake

if TYPE_CHECKING:
    from telegrad.connection.peers import Peer, Peers

_RETRY_DELAY = 0.1  # seconds between two attempts to connect if the session does not say when the next is due


class Connector:
    """Opens links to peers, performs the handshake, and attaches the links to channels."""

    def __init__(self, local: LocalWorker, peers: Peers, transports: Mapping[str, Transport]) -> None:
        self._local = local
        self._peers = peers
        self._transports = transports  # by scheme
        self.connecting: list[Link] = []
        """Links that are open and in their handshake."""

    def channel_to(self, peer: Peer, deadline: float | None) -> Channel:
        """Return the channel for calls to `peer`. The first caller opens it, and the others wait for that."""
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
                    peer.opening = self._local.runtime.event()
            if opening is None:
                return self._open_channel(peer, deadline)
            if not self._local.executor.wait(opening, deadline):
                raise self._deadline_exceeded(peer)

    def _open_channel(self, peer: Peer, deadline: float | None) -> Channel:
        local = self._local
        channel: Channel | None = None
        try:
            transport, _ = self._route_to(peer.record)
            channel = self._peers.make_channel(
                local,
                self._peers,
                peer.record,
                outgoing=True,
                resumable=transport.resumable,
                session_id=local.runtime.random_bits(63),
                settings=local.settings.session,
                allocate=local.buffers.take,
            )
            while True:
                now = local.runtime.now()
                if deadline is not None and now >= deadline:
                    raise self._deadline_exceeded(peer)
                if peer.gone:
                    raise WorkerLost(f"worker {peer.record.name!r} is gone: {peer.gone}", worker=peer.record.name)
                with channel.lock:
                    channel.session.tick(now)
                if self.connect(channel, peer, fresh=True):
                    break
                if channel.session.state is SessionState.LOST:
                    reason = channel.session.lost_reason
                    raise WorkerLost(f"worker {peer.record.name!r} is lost: {reason}", worker=peer.record.name)
                with channel.lock:
                    due = channel.session.next_tick()
                pause = now + _RETRY_DELAY if due is None else due
                local.executor.wait(local.runtime.event(), pause if deadline is None else min(pause, deadline))
            return channel
        except WorkerLost as error:
            self._peers.lost_workers.peer_lost(peer, str(error))
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
        """Open a link for `channel`. Returns False if that failed; the session then knows why.

        Raises if the peer refuses the handshake, because retrying would not help.
        """
        local = self._local
        transport, address = self._route_to(peer.record)
        deadline = local.runtime.now() + local.settings.connect_timeout
        local.executor.block()
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
            local.executor.unblock()
        self.connecting.append(link)
        try:
            # What the system may refuse comes first: a peer that admitted us and then sees the connection end would
            # take this worker for dead.
            local.poller.add(link, read=False, once=True)
            handshake = self._handshake if link.resumable else self._shielded_handshake
            received = handshake(link, channel, peer, deadline, fresh)
            channel.attach(link, received)
        except OtherVersion:
            link.close()
            raise
        except (LinkClosed, TimeoutError, ProtocolError) as error:
            link.close()
            channel.connect_failed(f"the handshake with {link.peer} failed ({error})", refused=False)
            return False
        except BaseException as error:
            link.close()
            if is_shortage(error):
                raise self._exhausted(peer, error) from error
            raise
        finally:
            self.connecting.remove(link)
        return True

    @shielded
    def _shielded_handshake(
        self, link: Link, channel: Channel, peer: Peer, deadline: float, fresh: bool
    ) -> tuple[int, int]:
        """Perform the handshake without interrupts: the peer would take the end of a unix link for our death."""
        return self._handshake(link, channel, peer, deadline, fresh)

    def _handshake(self, link: Link, channel: Channel, peer: Peer, deadline: float, fresh: bool) -> tuple[int, int]:
        """Authenticate `link`, and return what the peer has received of the session."""
        local = self._local
        opener = Opener(
            local.me,
            peer.record,
            local.token,
            local.runtime.random_bits(8 * NONCE_SIZE).to_bytes(NONCE_SIZE, "big"),
            session=channel.session_id,
            received=channel.session.received_up_to(),
            fresh=fresh,
        )
        send_greeting(link, opener.start())
        while True:
            ready = local.executor.wait_for_link(link, deadline)
            if local.runtime.now() >= deadline and not ready & Ready.READ:
                raise TimeoutError(f"no response within {local.settings.connect_timeout:g} s")
            try:
                for frame in link.receive():
                    received = self._advance(link, opener, frame)
                    if received is not None:
                        return received
            except Exception as error:
                # Nothing was read, so retry. The peer may have admitted us, and would take this worker for dead.
                if not is_shortage(error) or local.runtime.now() >= deadline:
                    raise
                local.executor.pause()

    def _advance(self, link: Link, opener: Opener, frame: Frame) -> tuple[int, int] | None:
        try:
            response = opener.receive(decode_handshake(frame.body))
        except Rejected as error:
            send_greeting(link, error.greeting)
            raise
        if isinstance(response, tuple):
            return response
        send_greeting(link, response)
        return None

    def _route_to(self, record: WorkerRecord) -> tuple[Transport, str]:
        """Return the best transport and address that both workers have."""
        own_host = self._local.me.host
        for address in record.addresses:
            scheme = address.partition("://")[0]
            transport = self._transports.get(scheme)
            if transport is not None and (scheme != "unix" or record.host == own_host):
                return transport, address
        raise WorkerLost(
            f"worker {record.name!r} listens at {', '.join(record.addresses) or 'no address'}, none of which this "
            f"worker can reach with its transports ({', '.join(self._transports)})",
            worker=record.name,
        )

    def _exhausted(self, peer: Peer, error: BaseException) -> ResourceExhausted:
        return ResourceExhausted(
            f"worker {self._local.me.name!r} lacks a resource to connect to worker {peer.record.name!r}: {error}. Free "
            "some, or raise its limit (ulimit -n for files): the next call connects again",
            worker=peer.record.name,
        )

    def _deadline_exceeded(self, peer: Peer) -> DeadlineExceeded:
        return DeadlineExceeded(
            f"worker {peer.record.name!r} could not be connected to before the deadline", worker=peer.record.name
        )


def send_greeting(link: Link, greeting: HandshakeMessage) -> None:
    """Send a handshake message."""
    link.send(Kind.HANDSHAKE, msgspec.msgpack.encode(greeting), 0, 0, 0)
