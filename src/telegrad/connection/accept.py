"""Accepts incoming connections and authenticates them.

Unauthenticated connections get bounded time and memory. At most MAX_PENDING connections may be in their handshake at
once. When the limit is reached, the oldest one makes room for the next, but not before it had a second: a member of the
group needs a few milliseconds. Until then, or while the process has no file descriptor left, new connections wait in
the listener's backlog.
"""

from __future__ import annotations

import logging
import threading
from functools import partial

from telegrad.connection.connector import send_greeting
from telegrad.connection.handshake import NONCE_SIZE, Acceptor, Rejected
from telegrad.connection.local_worker import LocalWorker
from telegrad.connection.peers import Peers
from telegrad.errors import AuthenticationError, ProtocolError, UnknownWorker, is_shortage
from telegrad.execution.timers import RETRY_DELAY
from telegrad.transport.base import Link, LinkClosed, Listener, Ready
from telegrad.wire.handshake_messages import decode_handshake

_log = logging.getLogger("telegrad")

MAX_PENDING = 256  # connections in their handshake at once
_MIN_HANDSHAKE_TIME = 1.0  # seconds that a connection has before it may be evicted
_SHORTAGE_PAUSE = 1.0  # seconds without accepting after the process ran out of file descriptors


class PendingConnections:
    """The incoming connections that are in their handshake."""

    def __init__(self, local: LocalWorker, peers: Peers) -> None:
        self._local = local
        self._peers = peers
        self._lock = threading.Lock()  # protects the three below
        self._pending: dict[PendingConnection, None] = {}  # oldest first
        self._paused: list[Listener] = []
        self._closed = False

    def watch(self, listener: Listener) -> None:
        """Accept connections on `listener` from now on."""
        listener.owner = _ListenerHandler(self, listener)
        self._local.poller.add(listener, read=True)

    def accept(self, listener: Listener) -> None:
        """Accept the connections in the backlog of `listener`, and start their handshakes."""
        while True:
            oldest = self._oldest_if_full()
            if oldest is not None:
                age = self._local.runtime.now() - oldest.accepted_at
                if age < _MIN_HANDSHAKE_TIME:
                    self._pause(listener, _MIN_HANDSHAKE_TIME - age)
                    return
            try:
                link = listener.accept()
            except (OSError, MemoryError) as error:
                _log.warning(
                    "worker %r accepts no connections for %g s: %s. Each connection takes a file descriptor: raise the "
                    "limit of open files (ulimit -n)",
                    *(self._local.me.name, _SHORTAGE_PAUSE, error),
                )
                self._pause(listener, _SHORTAGE_PAUSE)
                return
            if link is None:
                return
            if oldest is not None:
                oldest.evict()
            try:
                connection = PendingConnection(self, self._local, self._peers, link)
            except Exception as error:  # noqa: BLE001 - this worker lacks a resource; the peer may retry
                _log.warning("worker %r cannot accept a connection from %s: %s", self._local.me.name, link.peer, error)
                link.close()
                self._pause(listener, _SHORTAGE_PAUSE)
                return
            with self._lock:
                if not self._closed:
                    self._pending[connection] = None
            if self._closed:
                connection.close()

    def _oldest_if_full(self) -> PendingConnection | None:
        with self._lock:
            return next(iter(self._pending)) if len(self._pending) >= MAX_PENDING else None

    def _pause(self, listener: Listener, seconds: float) -> None:
        # The timer comes first: if it cannot be set, the listener must not be paused for ever.
        self._local.executor.timers.at(self._local.runtime.now() + seconds, partial(self._resume, listener))
        with self._lock:
            self._paused.append(listener)
        self._local.poller.arm(listener, read=False)

    def _resume(self, listener: Listener) -> None:
        with self._lock:
            if listener not in self._paused or self._closed:
                return
            self._paused.remove(listener)
        self._local.poller.arm(listener, read=True)

    def discard(self, connection: PendingConnection) -> None:
        """Forget a connection whose handshake is over, and resume accepting if that makes room."""
        with self._lock:
            self._pending.pop(connection, None)
            paused = list(self._paused) if len(self._pending) == MAX_PENDING - 1 else ()
        for listener in paused:
            self._resume(listener)

    def all(self) -> list[PendingConnection]:
        """Return the connections that are in their handshake, oldest first."""
        with self._lock:
            return list(self._pending)

    def abandon(self) -> None:
        """Close a forked child's copies of the connections. Takes no locks: the parent may have held one."""
        for connection in list(self._pending):
            connection.link.abandon()

    def close(self) -> None:
        """Close all pending connections, and refuse new ones."""
        with self._lock:
            self._closed = True
        for connection in self.all():
            connection.close()


class _ListenerHandler:
    """Accepts connections when the poller reports a listener."""

    def __init__(self, connections: PendingConnections, listener: Listener) -> None:
        self._connections = connections
        self._listener = listener

    def on_ready(self, ready: int) -> None:
        """Accept what is in the backlog. Called by the poller."""
        self._connections.accept(self._listener)


class PendingConnection:
    """An incoming connection, until its handshake is over."""

    def __init__(self, connections: PendingConnections, local: LocalWorker, peers: Peers, link: Link) -> None:
        self._connections = connections
        self._local = local
        self._peers = peers
        self.link = link
        self.accepted_at = local.runtime.now()
        self._acceptor = Acceptor(
            local.me,
            local.token,
            local.runtime.random_bits(8 * NONCE_SIZE).to_bytes(NONCE_SIZE, "big"),
            check=lambda hello: peers.check(hello, link),
            resume=lambda hello, proof: peers.resume(link, hello, proof),
        )
        link.owner = self
        local.poller.add(link, read=True)
        self._timer = local.executor.timers.at(self.accepted_at + local.settings.connect_timeout, self._timed_out)

    def on_ready(self, ready: int) -> None:
        """Continue the handshake. Called by the poller."""
        if self._acceptor.proof is not None:  # a retry after a shortage: what arrives now belongs to the channel
            return
        if ready & Ready.WRITE:
            self.link.flush()
        try:
            for frame in self.link.receive():
                response = self._acceptor.receive(decode_handshake(frame.body))
                send_greeting(self.link, response)
                if self._acceptor.proof is not None:
                    self._admit()
                    return
        except Rejected as error:
            send_greeting(self.link, error.greeting)
            self._refuse(str(error))
        except LinkClosed as error:
            _log.debug("%s left during its handshake: %s", self.link.peer, error)
            self.close()
        except (AuthenticationError, ProtocolError, UnknownWorker) as error:
            self._refuse(str(error))
        except Exception as error:  # noqa: BLE001 - this worker failed, not the peer
            if is_shortage(error) and self._acceptor.proof is None:  # nothing was read yet, so retry
                retry_at = self._local.runtime.now() + RETRY_DELAY
                self._local.executor.timers.at(retry_at, partial(self.on_ready, Ready.READ))
            else:  # the peer sees the connection end and retries
                self._refuse(f"this worker failed: {error!r}")

    def _admit(self) -> None:
        """Hand the authenticated connection over to its channel."""
        hello, proof = self._acceptor.hello, self._acceptor.proof
        assert hello is not None
        assert proof is not None
        self._finish()
        channel = self._peers.find(hello.name).incoming
        if channel is None or channel.session_id != proof.session:  # superseded by a newer connection
            self.link.close()
            return
        try:
            channel.attach(self.link, proof.received)
        except ProtocolError as error:
            self.link.close()
            with channel.lock:
                channel.session.mark_lost(str(error))
            self._peers.lost_workers.channel_lost(channel, str(error))
            return
        except BaseException:
            self.link.close()
            raise
        channel.receiver.on_ready(Ready.READ)  # read what arrived together with the proof

    def _refuse(self, reason: str) -> None:
        peer = f"worker {self._acceptor.hello.name!r}" if self._acceptor.hello is not None else "an unknown peer"
        _log.warning(
            "worker %r refused a connection from %s (%s): %s", self._local.me.name, peer, self.link.peer, reason
        )
        self.close()

    def _timed_out(self) -> None:
        self._refuse(f"no proof within {self._local.settings.connect_timeout:g} s")

    def _finish(self) -> None:
        self._local.executor.timers.cancel(self._timer)
        self._connections.discard(self)

    def evict(self) -> None:
        """Close the connection to make room for others."""
        self._refuse("too many connections are in their handshake, and this one is the oldest")

    def close(self) -> None:
        """Close the connection."""
        self._finish()
        self.link.owner = None  # breaks a reference cycle that would keep the link's buffers until the next collection
        self.link.close()
