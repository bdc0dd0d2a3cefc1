"""The unix socket at which processes of the same user, and root, may look at a worker and its group, without a token.

It is in the private directory of the user's sockets. The kernel says who connects. Each connection has a thread of its
own, so a worker whose other threads are all busy or blocked still answers.
"""

from __future__ import annotations

import logging
import os
import socket
import struct
import threading
from functools import partial
from pathlib import Path

from telegrad.agent.agent import Agent
from telegrad.errors import LimitExceeded, TelegradError
from telegrad.observe.answer import answer
from telegrad.observe.attach_protocol import MOST_OBSERVERS, MOST_REQUEST, receive, send, too_many
from telegrad.observe.service import OFF, allowed
from telegrad.transport.addresses import MAX_SUN_PATH, observe_address
from telegrad.transport.base import Link, Listener

_log = logging.getLogger("telegrad")

_IDLE = 120.0  # seconds after which a connection without a request is closed
_RETRY = 1.0  # seconds until the next attempt to accept, after one that failed: there may be no file descriptor
_CREDENTIALS = struct.Struct("iII")


def listen(agent: Agent) -> None:
    """Let processes of this user look at a worker that serves, if its settings allow that."""
    if allowed(agent) == OFF:
        return
    try:
        own = [address for address in agent.me.addresses if address.startswith("unix://")]
        if not own:
            raise TelegradError("it uses no unix sockets (transports)")
        path = Path(observe_address(own[0]).removeprefix("unix://"))
        if len(os.fsencode(path)) > MAX_SUN_PATH:
            raise TelegradError(f"the path {path} is too long for a unix socket")
        listener = LocalObservers(agent, path)
        agent.listeners.append(listener)
        agent.executor.threads.start("observers", listener.accept_all)
    except (OSError, TelegradError) as error:
        _log.info("worker %r cannot be looked at by `telegrad status` on this host: %s", agent.me.name, error)


class LocalObservers(Listener):
    """Accepts observers, on a thread of its own. The agent closes it as one of its listeners."""

    is_open = False  # not for the poller

    def __init__(self, agent: Agent, path: Path) -> None:
        self._agent = agent
        self._path = path
        self.address = f"unix://{path}"
        self._lock = threading.Lock()  # protects the two below
        self._connections: set[socket.socket] = set()
        self._closed = False
        self._ended = threading.Event()  # ends the wait between two attempts to accept
        # Bound under another name, and renamed when it listens: see `telegrad.transport.unix`.
        temporary = path.with_suffix(".new")
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.bind(str(temporary))
            temporary.chmod(0o600)
            self._socket.listen(MOST_OBSERVERS)
            temporary.rename(path)
        except OSError:
            self._socket.close()
            temporary.unlink(missing_ok=True)
            raise

    def accept(self) -> Link | None:
        """Nothing: observers are not links."""
        return None

    def accept_all(self) -> None:
        """Accept observers until this is closed."""
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError as error:
                if self._closed or self._agent.closed:
                    return
                _log.debug("worker %r cannot accept an observer now: %s", self._agent.me.name, error)
                if self._ended.wait(_RETRY):
                    return
                continue
            trusted = _is_trusted(connection)
            with self._lock:
                full = len(self._connections) >= MOST_OBSERVERS
                refused = self._closed or full or not trusted
                if not refused:
                    self._connections.add(connection)
            if refused:
                if trusted and full:
                    self._tell_that_it_is_full(connection)
                connection.close()
                continue
            try:
                self._agent.executor.threads.start("observer", partial(self._serve, connection))
            except TelegradError as error:
                _log.debug("an observer was refused: %s", error)
                self._end(connection)

    def _tell_that_it_is_full(self, connection: socket.socket) -> None:
        try:
            connection.setblocking(False)
            send(connection, too_many(self._agent.me.name))
        except OSError as error:
            _log.debug("an observer of worker %r is gone before it was refused: %s", self._agent.me.name, error)

    def _serve(self, connection: socket.socket) -> None:
        try:
            connection.settimeout(_IDLE)
            while (request := receive(connection, MOST_REQUEST)) is not None:
                send(connection, answer(self._agent, request))
        except (OSError, LimitExceeded) as error:
            _log.debug("an observer of worker %r is gone: %s", self._agent.me.name, error)
        finally:
            self._end(connection)

    def _end(self, connection: socket.socket) -> None:
        with self._lock:
            self._connections.discard(connection)
        connection.close()

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            connections = list(self._connections)
        self._ended.set()
        self._path.unlink(missing_ok=True)
        for each in (self._socket, *connections):
            try:
                each.shutdown(socket.SHUT_RDWR)  # wakes its thread
            except OSError as error:
                _log.debug("an observer is gone already: %s", error)
        self._socket.close()

    def abandon(self) -> None:
        for each in (self._socket, *list(self._connections)):
            each.close()


def _is_trusted(connection: socket.socket) -> bool:
    """Return whether the process at the other end belongs to this user, or to root."""
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, uid, _ = _CREDENTIALS.unpack(data)
    return uid in (0, os.getuid())
