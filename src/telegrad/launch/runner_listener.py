"""Where the runners of a group connect to their launcher. Each connection is checked on a thread of its own."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import ssl
import threading
from collections import deque
from collections.abc import Sequence

from telegrad.errors import AuthenticationError, ProtocolError
from telegrad.launch.listening import LOOPBACK, listen
from telegrad.launch.runner_channel import ChannelClosed, Invitation, TlsChannel, accept
from telegrad.launch.runner_messages import Hello
from telegrad.transport.ports import PORTS_VARIABLE

_log = logging.getLogger("telegrad")

_MOST_UNCHECKED = 256
"""Connections that are being checked at the same time; more wait. A check ends after some seconds."""
_PAUSE = 0.1  # seconds before the next attempt if the system has no descriptors left


class RunnerListener:
    """Listens for the runners of one group, and queues those that prove that this launcher has started them."""

    def __init__(self, addresses: Sequence[str]) -> None:
        """Listen on all interfaces unless there is only a loopback address, on a port that TELEGRAD_PORTS allows."""
        # Imported here, because it takes 50 ms.
        from telegrad.transport.certificates import make_credentials

        credentials = make_credentials()
        self._context = credentials.listener
        self._socket = listen(os.environ.get(PORTS_VARIABLE, ""), loopback=list(addresses) == [LOOPBACK])
        port = self._socket.getsockname()[1]
        self.invitation = Invitation(list(addresses), port, secrets.token_hex(32), credentials.binding.hex())
        self._read_end, self._write_end = os.pipe()
        os.set_blocking(self._read_end, False)
        self._slots = threading.Semaphore(_MOST_UNCHECKED)
        self._closed = threading.Event()
        self._lock = threading.Lock()  # protects _checked, and both ends of the pipe against `close`
        self._checked: deque[tuple[TlsChannel, Hello]] = deque()
        threading.Thread(target=self._accept, name="telegrad-runners", daemon=True).start()

    def fileno(self) -> int:
        """Return the descriptor that is readable when a runner has connected."""
        return self._read_end

    def connected(self) -> list[tuple[TlsChannel, Hello]]:
        """Return the runners that have connected since the last call."""
        with contextlib.suppress(BlockingIOError):
            os.read(self._read_end, 4096)
        with self._lock:
            found = list(self._checked)
            self._checked.clear()
        return found

    def close(self) -> None:
        """Accept no more."""
        with self._lock:
            self._closed.set()
            for channel, _ in self._checked:
                channel.close()
            os.close(self._write_end)
            os.close(self._read_end)
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._socket.close()

    def _accept(self) -> None:
        while not self._closed.is_set():
            if not self._slots.acquire(timeout=_PAUSE):
                continue
            try:
                connection, _ = self._socket.accept()
            except OSError as error:
                self._slots.release()
                if not self._closed.wait(_PAUSE):
                    _log.warning("the launcher cannot accept a runner: %s", error)
                continue
            thread = threading.Thread(target=self._check, args=(connection,), name="telegrad-runner", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:  # a shortage of threads
                self._slots.release()
                connection.close()
                _log.warning("the launcher cannot check a connection: %s", error)

    def _check(self, connection: socket.socket) -> None:
        try:
            channel, hello = accept(connection, self._context, self.invitation)
        except (OSError, ssl.SSLError, AuthenticationError, ProtocolError, ChannelClosed) as error:
            connection.close()
            _log.warning("the launcher has refused a connection: %s", error)
            return
        finally:
            self._slots.release()
        with self._lock:
            if self._closed.is_set():
                channel.close()
            else:
                self._checked.append((channel, hello))
                os.write(self._write_end, b"x")


def launcher_addresses() -> list[str]:
    """Return the addresses of this machine under which runners may reach it, the most general ones first."""
    found: list[str] = []
    with contextlib.suppress(OSError):
        infos = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
        found += [str(info[4][0]) for info in infos]
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # Sends nothing: it asks the system for the way to other networks.
        found.append(str(probe.getsockname()[0]))
    outside = [address for address in found if not address.startswith(("127.", "::1"))]
    return list(dict.fromkeys([*outside, LOOPBACK]))
