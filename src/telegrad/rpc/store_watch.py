"""Keeps the store of the group while the agent lives, and publishes the group again when the store was replaced.

The process of rank 0 may host the store. It keeps it open as long as its agent, for workers that join later. If it
dies, the group goes on. The other members notice, because each has a connection to the store that is used for nothing
else. Then a thread looks for another store at the same address, which the replacement of rank 0 hosts, and publishes
the group there (`Noticeboard.publish_group`). It ends when that is done, or at shutdown.
"""

from __future__ import annotations

import logging
import socket
import threading
from datetime import timedelta

from torch.distributed import (  # type: ignore[attr-defined]  # public, but not in __all__
    PrefixStore,
    TCPStore,
)

from telegrad.agent.agent import Agent
from telegrad.errors import TelegradError
from telegrad.rendezvous_members import Noticeboard
from telegrad.transport.sockets import SocketListener

_log = logging.getLogger("telegrad")

_FIRST_PAUSE, _MAX_PAUSE = 0.2, 5.0  # seconds between attempts to reach the store
_TIMEOUT = 5.0  # seconds for one attempt
LEAVE_TIMEOUT = 2.0
"""Seconds that a store may take to note that this worker leaves."""


class StoreWatch:
    """What one agent does for the store of its group."""

    def __init__(self, agent: Agent, board: Noticeboard, prefix: str, address: tuple[str, int] | None) -> None:
        """`address` is that of the store, if another worker hosts it. All entries have the prefix."""
        self._agent = agent
        self._board: Noticeboard | None = board
        self._prefix = prefix
        self._address = address
        self._stop = agent.runtime.event()
        self._lock = threading.Lock()  # protects _connection and _closed
        self._connection: SocketListener | None = None
        self._closed = False
        agent.shutdown_protocol.on_leave = self.leave
        agent.shutdown_protocol.on_closed = self.close
        if address is not None:
            try:
                self._watch(self._connect(address))
            except OSError:
                self._find_store()

    def _connect(self, address: tuple[str, int]) -> socket.socket:
        connection = socket.create_connection(address, timeout=_TIMEOUT)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 20)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
        return connection

    def _watch(self, connection: socket.socket) -> None:
        """Let the agent's poller report the end of a connection to the store."""
        item = SocketListener(connection, "the rendezvous store", lambda sock: None)
        item.owner = self
        with self._lock:
            if self._closed:
                item.close()
                return
            self._connection = item
        self._agent.poller.add(item, read=True, once=True)

    def on_ready(self, ready: int) -> None:
        """The connection to the store has ended. Called by the poller's thread."""
        self._drop_connection()
        self._find_store()

    def _drop_connection(self) -> None:
        with self._lock:
            connection, self._connection = self._connection, None
        if connection is not None:
            self._agent.poller.remove(connection)
            connection.close()

    def _find_store(self) -> None:
        if not self._stop.is_set():
            self._agent.runtime.start_thread(f"telegrad-{self._agent.me.name}-store", self._publish_again)

    def _publish_again(self) -> None:
        """Look for another store, and publish the group there."""
        now, pause = self._agent.runtime.now, _FIRST_PAUSE
        while self._board is not None and not self._stop.wait(now() + pause):
            pause = min(2 * pause, _MAX_PAUSE)
            try:
                if self._publish_at(self._address or ("", 0)):
                    return
            except (OSError, RuntimeError) as error:  # torch's stores raise RuntimeError
                _log.debug("worker %r finds no rendezvous store: %s", self._agent.me.name, error)

    def _publish_at(self, address: tuple[str, int]) -> bool:
        """Publish the group in the store at the address. Returns whether that is done, or is not to be done."""
        connection = self._connect(address)
        try:
            store = PrefixStore(
                self._prefix,
                TCPStore(*address, None, False, timedelta(seconds=_TIMEOUT), wait_for_workers=False),
            )
            peers, board = self._agent.peers.all(), self._board
            gone = {peer.record.incarnation for peer in peers if peer.gone}
            if board is not None and not board.publish_group(store, [peer.record for peer in peers], gone):
                _log.warning(
                    "worker %r finds another group in the rendezvous store, which has taken the place of its own: no "
                    "worker can join its group any more",
                    self._agent.me.name,
                )
                connection.close()
                return True
        except BaseException:
            connection.close()
            raise
        self._watch(connection)
        return True

    def leave(self) -> None:
        """Note in the store that this worker leaves, as far as that is possible in a short time."""
        if self._stop.is_set():
            return
        self._stop.set()
        done, runtime = self._agent.runtime.event(), self._agent.runtime

        def note() -> None:
            board = self._board
            try:
                if board is not None:
                    board.leave()
            except (RuntimeError, TelegradError) as error:
                _log.debug("worker %r leaves a group whose store is gone: %s", self._agent.me.name, error)
            finally:
                done.set()

        runtime.start_thread(f"telegrad-{self._agent.me.name}-leave", note)
        done.wait(runtime.now() + LEAVE_TIMEOUT)

    def close(self) -> None:
        """Close the store."""
        with self._lock:
            self._closed = True
        self._drop_connection()
        self._board = None  # the last reference to the store; torch closes it
