"""Accepts incoming connections and authenticates them.

Unauthenticated connections get bounded time and memory, and members are served before them:

- With TLS, a connection that does not begin with a valid preamble is closed before OpenSSL gets anything of it, and
  without an answer; see `telegrad.wire.preamble`.
- At most MAX_PENDING connections may be in their handshake at once. When all places are taken, the next connection
  evicts one that has sent no valid preamble or Hello; see `telegrad.connection.eviction`.
- The thread that polls accepts a few connections per round, and reads from a few of those that sent something. So the
  links of members are read in between. Members in their handshake come first, and sources take turns.
- If the process has no file descriptor left, connections without a valid preamble or Hello are evicted, too. Only if
  there are none does the next connection wait in the listener's backlog.
"""

from __future__ import annotations

import logging
import resource
import threading
from functools import partial

from telegrad.connection.eviction import GREETED, UNREAD, WAITING, EvictionOrder
from telegrad.connection.local_worker import LocalWorker
from telegrad.connection.peers import Peers
from telegrad.connection.pending_connection import PendingConnection
from telegrad.connection.refusal_log import INTERVAL, RefusalLog
from telegrad.connection.serving_order import ServingOrder
from telegrad.errors import is_shortage
from telegrad.execution.timers import Timer
from telegrad.transport.base import Link, Listener

_log = logging.getLogger("telegrad")

MAX_PENDING = 256  # connections in their handshake at once
_BATCH = 32  # connections to accept, or to read from, before other links are served
_ROUND_TIME = 0.001  # seconds after which a batch ends early
_FULL_PAUSE = 0.005  # seconds without accepting if every pending connection has to be given more time
_SHORTAGE_PAUSE = 0.1  # seconds without accepting if the process has no file descriptor left


class PendingConnections:
    """The incoming connections that are in their handshake."""

    def __init__(self, local: LocalWorker, peers: Peers) -> None:
        self._local = local
        self._peers = peers
        self._lock = threading.Lock()  # protects all below
        self._pending: dict[PendingConnection, None] = {}  # oldest first
        self._order: EvictionOrder[PendingConnection] = EvictionOrder()
        self._unread: ServingOrder[PendingConnection] = ServingOrder()
        self._serving = False  # a timer is set
        self._expiry: Timer | None = None
        self._paused: list[Listener] = []
        self._closed = False
        self._shortage_logged_at = -INTERVAL
        self.refusals = RefusalLog(local)

    def watch(self, listener: Listener) -> None:
        """Accept connections on `listener` from now on."""
        listener.owner = _ListenerHandler(self, listener)
        self._local.poller.add(listener, read=True)

    # -- accepting --------------------------------------------------------------------------------------------

    def accept(self, listener: Listener) -> None:
        """Accept some of the connections in the backlog of `listener`. The poller reports it again for the rest."""
        now = self._local.runtime.now
        end = now() + _ROUND_TIME
        for number in range(_BATCH):
            full, victim = self._victim_if_full()
            if full and victim is None:
                self._pause(listener, _FULL_PAUSE)
                return
            try:
                link = listener.accept()
                if dropped := listener.take_dropped():
                    self.refusals.add_dropped(dropped)
                if link is None:
                    return
                if victim is not None:
                    victim.evict()
                try:
                    connection = PendingConnection(self, self._local, self._peers, link)
                    is_open = self._add(connection)
                except BaseException:
                    link.close()
                    raise
            except Exception as error:  # noqa: BLE001 - this worker lacks a resource; the peer waits, or may retry
                if number == 0:  # otherwise there may be no connection: the kernel looks for a descriptor first
                    self._handle_shortage(listener, error)
                return
            if not is_open:
                connection.close()
                return
            self._schedule_expiry(connection)
            if now() >= end:
                return

    def adopt(self, link: Link) -> None:
        """Let the other side of a connection that this worker has opened begin the handshake."""
        connection = PendingConnection(self, self._local, self._peers, link)
        if self._add(connection):
            self._schedule_expiry(connection)
        else:
            connection.close()

    def _add(self, connection: PendingConnection) -> bool:
        """Begin a handshake. Returns False if this worker accepts no more."""
        with self._lock:
            if self._closed:
                return False
            self._pending[connection] = None
            self._order.add(connection)
        try:
            # Not earlier: another thread may poll, and a connection is reported once.
            self._local.poller.add(connection.link, read=True, once=True)
        except BaseException:
            self.discard(connection)
            raise
        return True

    def _victim_if_full(self) -> tuple[bool, PendingConnection | None]:
        """Return whether all places are taken, and which connection may be evicted, if any."""
        with self._lock:
            places = _places()
            if len(self._pending) < places:
                return False, None
            return True, self._order.victim(self._local.runtime.now(), places)

    def _handle_shortage(self, listener: Listener, error: Exception) -> None:
        """Evict a stranger's connection, or try again later. The poller reports the listener again."""
        now = self._local.runtime.now()
        with self._lock:
            strangers = is_shortage(error) and self._order.has_strangers()
            victim = self._order.stranger(now) if strangers else None
        if victim is not None:
            victim.evict()
            return
        if strangers:
            self._pause(listener, _FULL_PAUSE)
            return
        self._pause(listener, _SHORTAGE_PAUSE)
        if now - self._shortage_logged_at >= INTERVAL:
            self._shortage_logged_at = now
            _log.warning(
                "worker %r cannot accept connections, and retries every %g s: %s. Each connection takes a file "
                "descriptor: raise the limit of open files (ulimit -n)",
                *(self._local.me.name, _SHORTAGE_PAUSE, error),
            )

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

    # -- serving ----------------------------------------------------------------------------------------------

    def enqueue(self, connection: PendingConnection) -> None:
        """Read from `connection` when it is its turn."""
        with self._lock:
            if connection not in self._pending or connection.is_queued:
                return
            connection.is_queued = True
            self._unread.add(connection, is_member=connection.stage == GREETED)
            if connection.stage != GREETED:
                connection.stage = UNREAD
            starts, self._serving = not self._serving, True
        if starts:
            self._schedule_serving()

    def _schedule_serving(self) -> None:
        try:
            self._local.executor.timers.at(self._local.runtime.now(), self._serve)
        except BaseException:
            self._serving = False
            raise

    def _serve(self) -> None:
        """Read from some connections. The timer is set again for the rest, so other links are read in between."""
        now = self._local.runtime.now
        end = now() + _ROUND_TIME
        try:
            for _ in range(_BATCH):
                connection = self._next_unread()
                if connection is None:
                    break
                connection.advance()
                if now() >= end:
                    break
        finally:
            with self._lock:
                self._serving = bool(self._unread) and not self._closed
            if self._serving:
                self._schedule_serving()

    def _next_unread(self) -> PendingConnection | None:
        with self._lock:
            connection = self._unread.take()
            if connection is not None:
                connection.is_queued = False
            return connection

    def served(self, connection: PendingConnection, greeted: bool) -> None:
        """Record that all that `connection` has sent was read, and whether that had a valid preamble or Hello."""
        with self._lock:
            if connection.stage != GREETED:
                connection.stage = GREETED if greeted else WAITING
                if greeted and connection in self._pending:
                    self._order.greeted(connection)

    # -- the end of a handshake -------------------------------------------------------------------------------

    def _schedule_expiry(self, connection: PendingConnection) -> None:
        """Set the timer for the oldest connection. One is enough, because all have the same time."""
        with self._lock:
            if self._expiry is not None or self._closed:
                return
            when = connection.accepted_at + self._local.settings.connect_timeout
            self._expiry = self._local.executor.timers.at(when, self._expire)

    def _expire(self) -> None:
        with self._lock:
            self._expiry = None
        for connection in self.all():
            if self._local.runtime.now() < connection.accepted_at + self._local.settings.connect_timeout:
                self._schedule_expiry(connection)
                return
            connection.time_out()

    def discard(self, connection: PendingConnection) -> None:
        """Forget a connection whose handshake is over, and resume accepting if that makes room."""
        with self._lock:
            self._pending.pop(connection, None)
            self._order.discard(connection)
            if connection.is_queued:
                connection.is_queued = False
                self._unread.remove(connection)
            paused = list(self._paused) if self._paused else ()
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
        with self._lock:
            expiry, self._expiry = self._expiry, None
        if expiry is not None:
            self._local.executor.timers.cancel(expiry)
        self.refusals.close()


class _ListenerHandler:
    """Accepts connections when the poller reports a listener."""

    def __init__(self, connections: PendingConnections, listener: Listener) -> None:
        self._connections = connections
        self._listener = listener

    def on_ready(self, ready: int) -> None:
        """Accept what is in the backlog. Called by the poller."""
        self._connections.accept(self._listener)


def _places() -> int:
    """Return how many connections may be in their handshake: no more than a quarter of the files that may be open."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_PENDING if files == resource.RLIM_INFINITY else min(MAX_PENDING, max(1, files // 4))
