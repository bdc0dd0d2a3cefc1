"""One incoming connection, until its handshake is over. `telegrad.connection.accept` has all of them."""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING

from telegrad.connection.dialer import send_greeting
from telegrad.connection.eviction import SILENT, source_of
from telegrad.connection.handshake import NONCE_SIZE, Acceptor, Rejected
from telegrad.connection.local_worker import LocalWorker
from telegrad.connection.peers import Peers
from telegrad.connection.refusal_log import Refusal
from telegrad.errors import AuthenticationError, ProtocolError, UnknownWorker, is_shortage
from telegrad.execution.timers import RETRY_DELAY
from telegrad.transport.base import Link, LinkClosed, Ready, RelayedConnection
from telegrad.wire.handshake_messages import Purpose, decode_handshake

if TYPE_CHECKING:
    from telegrad.connection.accept import PendingConnections

_log = logging.getLogger("telegrad")


class PendingConnection:
    """An incoming connection, until its handshake is over."""

    def __init__(self, connections: PendingConnections, local: LocalWorker, peers: Peers, link: Link) -> None:
        self._connections = connections
        self._local = local
        self._peers = peers
        self.link = link
        self.source = source_of(link.peer)
        self.stage = SILENT
        self.is_queued = False
        self.accepted_at = local.runtime.now()
        self._acceptor: Acceptor | None = None  # made when something has arrived: most strangers send nothing
        link.owner = self

    def on_ready(self, ready: int) -> None:
        """Take note that there is something to read, or room to write. Called by the poller."""
        if ready & Ready.WRITE:
            self.link.flush()
        if ready & Ready.READ:
            self._connections.enqueue(self)
        else:
            self._local.poller.arm(self.link, read=True)

    def advance(self) -> None:
        """Continue the handshake with what has arrived."""
        acceptor = self._acceptor
        taken = False  # a message was taken off the link, and not handled yet
        try:
            if acceptor is None:
                acceptor = self._acceptor = self._make_acceptor()
            for frame in self.link.receive():
                taken = True
                response = acceptor.receive(decode_handshake(frame.body))
                send_greeting(self.link, response)
                if acceptor.proof is not None:
                    self._admit(acceptor)
                    return
                taken = False
            self._connections.served(self, acceptor.hello is not None or self.link.has_preamble)
            self._local.poller.arm(self.link, read=True)
        except RelayedConnection as relayed:
            self._connections.discard(self)
            self.link.owner = None
            self._peers.relaying.take(relayed.release(), relayed.header)
        except Rejected as error:
            if error.greeting is not None:
                send_greeting(self.link, error.greeting)
            is_question = acceptor is not None and acceptor.hello is not None and acceptor.hello.purpose.is_question
            self._refuse(Refusal.QUESTION if is_question else Refusal.OTHER, str(error))
        except LinkClosed as error:
            self._refuse(Refusal.LEFT, str(error))
        except AuthenticationError as error:  # it does not know our token, or found that it is not its own
            self._refuse(Refusal.TOKEN, str(error))
        except UnknownWorker as error:
            self._refuse(Refusal.OTHER, str(error))
        except ProtocolError as error:
            self._refuse(Refusal.NOT_TELEGRAD, str(error))
        except Exception as error:  # noqa: BLE001 - this worker failed, not the peer
            if is_shortage(error) and not taken:  # the link still has what the peer sent, so retry
                retry_at = self._local.runtime.now() + RETRY_DELAY
                self._local.executor.timers.at(retry_at, partial(self.on_ready, Ready.READ))
            else:  # the peer sees the connection end and retries
                self._refuse(Refusal.OTHER, f"this worker failed: {error!r}")

    def _make_acceptor(self) -> Acceptor:
        local, peers, link = self._local, self._peers, self.link
        return Acceptor(
            local.me,
            local.keys.handshake if local.keys is not None else None,
            local.runtime.random_bits(8 * NONCE_SIZE).to_bytes(NONCE_SIZE, "big"),
            check=peers.check,
            resume=lambda hello: peers.resume(link, hello),
            known_generation=peers.known_generation,
            describe=lambda hello: peers.describe(hello.session),
            link=link,
        )

    def _admit(self, acceptor: Acceptor) -> None:
        """Hand the authenticated connection over to its channel."""
        hello = acceptor.hello
        assert hello is not None
        self._connections.discard(self)
        if hello.purpose is Purpose.OBSERVE and self._peers.observers is not None:
            self._peers.observers(self.link)
            return
        if hello.purpose is not Purpose.SESSION:  # the answer was all that it wanted
            self.link.owner = None
            self.link.close()
            return
        channel = self._peers.find(hello.name).incoming
        if channel is None or channel.session_id != hello.session:  # superseded by a newer connection
            self.link.close()
            return
        try:
            channel.attach(self.link, hello.received)
        except ProtocolError as error:
            self.link.close()
            with channel.lock:
                channel.session.mark_lost(str(error))
            self._peers.lost_workers.channel_lost(channel, str(error))
            return
        except BaseException:
            self.link.close()
            raise
        _log.debug("worker %r accepted a connection of worker %r (%s)", self._local.name, hello.name, self.link.peer)
        channel.receiver.on_ready(Ready.READ)  # read what arrived together with the proof

    def _refuse(self, kind: Refusal, reason: str) -> None:
        hello = self._acceptor.hello if self._acceptor is not None else None
        who = f"worker {hello.name!r}" if hello is not None else "an unknown peer"
        try:
            self._connections.refusals.add(kind, self.source, f"{who} ({self.link.peer})", reason)
        finally:
            self.close()

    def time_out(self) -> None:
        """Close the connection, because its time is over."""
        self._refuse(Refusal.LATE, f"no proof within {self._local.settings.connect_timeout:g} s")

    def evict(self) -> None:
        """Close the connection to make room for others."""
        self.link.abort()
        self._refuse(Refusal.EVICTED, "too many connections are in their handshake, and this one made room")

    def close(self) -> None:
        """Close the connection."""
        self._connections.discard(self)
        self.link.owner = None  # breaks a reference cycle that would keep the link's buffers until the next collection
        self.link.close()
