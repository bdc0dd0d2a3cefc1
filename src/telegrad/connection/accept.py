"""Who comes in: connections that others open to us, until they have proved that they belong to the group.

Strangers cannot be kept from connecting, but they get little. There is a bound on how many may be in their handshake at
once: the one that has been for longest, and at least a second, makes room for the next. (A member of the group needs
some milliseconds.) While none has been for so long, or the process has no file descriptor left, others wait outside.
"""

from __future__ import annotations

import logging
import threading
from functools import partial
from typing import Protocol

from telegrad.connection.channel import Channel
from telegrad.connection.handshake import NONCE_SIZE, Acceptor, Rejected
from telegrad.connection.peers import Peers, send_greeting
from telegrad.connection.worker_record import WorkerRecord
from telegrad.errors import AuthenticationError, ProtocolError, UnknownWorker, is_shortage
from telegrad.execution.executor import AGAIN, Executor
from telegrad.settings import AgentSettings
from telegrad.transport.base import Link, LinkClosed, Listener, Poller, Ready
from telegrad.waiting import Runtime
from telegrad.wire.handshake_messages import decode_handshake

_log = logging.getLogger("telegrad")

MOST = 256  # connections in their handshake at once
_KEPT = 1.0  # seconds that each may be there before it has to make room
_PAUSE = 1.0  # seconds for which others wait outside where the process has no file descriptor left


class AcceptOwner(Protocol):
    """What letting in needs of its agent."""

    me: WorkerRecord
    token: bytes | None
    settings: AgentSettings
    runtime: Runtime
    executor: Executor
    poller: Poller

    def channel_lost(self, channel: Channel, reason: str) -> None:
        """The session ended: the peer is lost."""


class PendingConnections:
    """The connections that are in their handshake."""

    def __init__(self, owner: AcceptOwner, peers: Peers) -> None:
        self._owner = owner
        self._peers = peers
        self._lock = threading.Lock()  # protects the three below
        self._inside: dict[PendingConnection, None] = {}  # in the order in which they came
        self._shut: list[Listener] = []  # where others wait outside
        self._closed = False

    def watch(self, listener: Listener) -> None:
        """Let in whoever connects there."""
        listener.owner = _Door(self, listener)
        self._owner.poller.add(listener, read=True)

    def accept(self, listener: Listener) -> None:
        """Let those that wait at `listener` start their handshake."""
        while True:
            first = self._first_of_too_many()
            if first is not None:
                age = self._owner.runtime.now() - first.since
                if age < _KEPT:
                    self._shut_for(listener, _KEPT - age)
                    return
            try:
                link = listener.accept()
            except (OSError, MemoryError) as error:
                _log.warning(
                    "worker %r cannot let anybody in for %g s: %s. Each connection takes a file descriptor: raise the "
                    "limit of open files (ulimit -n)",
                    *(self._owner.me.name, _PAUSE, error),
                )
                self._shut_for(listener, _PAUSE)
                return
            if link is None:
                return
            if first is not None:
                first.show_out()
            try:
                guest = PendingConnection(self, self._owner, self._peers, link)
            except Exception as error:  # noqa: BLE001 - we are short of something; whoever it is may come again
                _log.warning("worker %r cannot let %s in: %s", self._owner.me.name, link.peer, error)
                link.close()
                self._shut_for(listener, _PAUSE)
                return
            with self._lock:
                if not self._closed:
                    self._inside[guest] = None
            if self._closed:
                guest.end()

    def _first_of_too_many(self) -> PendingConnection | None:
        with self._lock:
            return next(iter(self._inside)) if len(self._inside) >= MOST else None

    def _shut_for(self, listener: Listener, seconds: float) -> None:
        # The timer first: without it, nobody would ever open again.
        self._owner.executor.at(self._owner.runtime.now() + seconds, partial(self._open, listener))
        with self._lock:
            self._shut.append(listener)
        self._owner.poller.arm(listener, read=False)

    def _open(self, listener: Listener) -> None:
        with self._lock:
            if listener not in self._shut or self._closed:
                return
            self._shut.remove(listener)
        self._owner.poller.arm(listener, read=True)

    def dismiss(self, guest: PendingConnection) -> None:
        """The handshake is over, one way or the other."""
        with self._lock:
            self._inside.pop(guest, None)
            shut = list(self._shut) if len(self._inside) == MOST - 1 else ()
        for listener in shut:
            self._open(listener)

    def inside(self) -> list[PendingConnection]:
        """Those that are in their handshake."""
        with self._lock:
            return list(self._inside)

    def abandon(self) -> None:
        """Close the child's copies of the connections after a fork. No locks: one may be held there for ever."""
        for guest in list(self._inside):
            guest.link.abandon()

    def close(self) -> None:
        """Refuse everybody from now on."""
        with self._lock:
            self._closed = True
        for guest in self.inside():
            guest.end()


class _Door:
    """A listener, and who is told when somebody waits there."""

    def __init__(self, guests: PendingConnections, listener: Listener) -> None:
        self._guests = guests
        self._listener = listener

    def on_ready(self, ready: int) -> None:
        """The poller found somebody."""
        self._guests.accept(self._listener)


class PendingConnection:
    """A connection that somebody opened to us, until its handshake is over."""

    def __init__(self, guests: PendingConnections, owner: AcceptOwner, peers: Peers, link: Link) -> None:
        self._guests = guests
        self._owner = owner
        self._peers = peers
        self.link = link
        self.since = owner.runtime.now()
        self._acceptor = Acceptor(
            owner.me,
            owner.token,
            owner.runtime.random_bits(8 * NONCE_SIZE).to_bytes(NONCE_SIZE, "big"),
            check=lambda hello: peers.check(hello, link),
            resume=lambda hello, proof: peers.resume(link, hello, proof),
        )
        link.owner = self
        owner.poller.add(link, read=True)
        self._timer = owner.executor.at(self.since + owner.settings.connect_timeout, self._too_slow)

    def on_ready(self, ready: int) -> None:
        """The poller found the link ready."""
        if ready & Ready.WRITE:
            self.link.flush()
        try:
            for frame in self.link.receive():
                answer = self._acceptor.take(decode_handshake(frame.body))
                send_greeting(self.link, answer)
                if self._acceptor.proof is not None:
                    self._admit()
                    return
        except Rejected as error:
            send_greeting(self.link, error.greeting)
            self._refuse(str(error))
        except LinkClosed as error:
            _log.debug("%s left during its handshake: %s", self.link.peer, error)
            self.end()
        except (AuthenticationError, ProtocolError, UnknownWorker) as error:
            self._refuse(str(error))
        except Exception as error:  # noqa: BLE001 - we failed
            if is_shortage(error) and self._acceptor.proof is None:  # nothing was read, and later it may be
                self._owner.executor.at(self._owner.runtime.now() + AGAIN, partial(self.on_ready, Ready.READ))
            else:  # the other side sees the end, and tries again
                self._refuse(f"this worker failed: {error!r}")

    def _admit(self) -> None:
        hello, proof = self._acceptor.hello, self._acceptor.proof
        assert hello is not None
        assert proof is not None
        self._over()
        channel = self._peers.find(hello.name).incoming
        if channel is None or channel.session_id != proof.session:  # overtaken by a newer connection
            self.link.close()
            return
        try:
            channel.attach(self.link, proof.received)
        except ProtocolError as error:
            self.link.close()
            with channel.lock:
                channel.session.lost(str(error))
            self._owner.channel_lost(channel, str(error))
            return
        except BaseException:
            self.link.close()
            raise
        channel.on_ready(Ready.READ)  # what came with the proof

    def _refuse(self, reason: str) -> None:
        who = f"worker {self._acceptor.hello.name!r}" if self._acceptor.hello is not None else "somebody"
        _log.warning(
            "worker %r refused a connection from %s (%s): %s", self._owner.me.name, who, self.link.peer, reason
        )
        self.end()

    def _too_slow(self) -> None:
        self._refuse(f"no proof within {self._owner.settings.connect_timeout:g} s")

    def _over(self) -> None:
        self._owner.executor.cancel(self._timer)
        self._guests.dismiss(self)

    def show_out(self) -> None:
        """Make room for others."""
        self._refuse("too many connections wait for their proof, and it was first")

    def end(self) -> None:
        """Close the connection."""
        self._over()
        self.link.owner = None  # or the two would keep each other, and what was read, until the next collection
        self.link.close()
