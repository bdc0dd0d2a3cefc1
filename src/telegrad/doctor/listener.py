"""`telegrad doctor --listen`: answers the doctors of other machines, so that they can measure the path."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator

from telegrad.doctor.probe_protocol import GREETING, LARGE, PROOF, Greeting, decode_greeting, proof

_PATIENCE = 10.0
"""Seconds that one conversation may take."""
_MAX_CONVERSATIONS = 16
_POLL = 0.2  # seconds between two looks at whether to end


class Listener:
    """Listens at one port and answers doctors, each on a thread of its own, at most `_MAX_CONVERSATIONS` at a time."""

    def __init__(
        self, host: str, port: int, token: bytes | None = None, clock: Callable[[], float] = time.time
    ) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, port), family=family, dualstack_ipv6=host == "::")
        self.port: int = self._socket.getsockname()[1]
        self._token = token
        self._clock = clock
        self._slots = threading.BoundedSemaphore(_MAX_CONVERSATIONS)
        self._closed = threading.Event()

    def serve(self, until: float | None = None) -> None:
        """Answer until `until`, a time of `time.monotonic`, or until `close` is called."""
        self._socket.settimeout(_POLL)
        threads: list[threading.Thread] = []
        while not self._closed.is_set() and (until is None or time.monotonic() < until):
            # Before it accepts: others wait in the backlog, and are not taken for a program that does not answer.
            if not self._slots.acquire(timeout=_POLL):
                continue
            try:
                connection, _ = self._socket.accept()
            except TimeoutError:
                self._slots.release()
                continue
            except OSError:  # no descriptor is left, or the client is gone: the next attempt may succeed
                self._slots.release()
                self._closed.wait(_POLL)
                continue
            threads = [thread for thread in threads if thread.is_alive()]
            threads.append(threading.Thread(target=self._answer, args=(connection,), daemon=True))
            threads[-1].start()
        for thread in threads:
            thread.join()
        self._socket.close()

    def close(self) -> None:
        """Stop serving."""
        self._closed.set()

    def _answer(self, connection: socket.socket) -> None:
        # The other side may be anybody: what goes wrong there ends the conversation.
        with self._released(), connection, contextlib.suppress(OSError, ValueError, EOFError):
            deadline = time.monotonic() + _PATIENCE
            mine = Greeting(os.urandom(16), self._clock())
            connection.settimeout(_PATIENCE)
            connection.sendall(mine.encode())
            theirs = decode_greeting(read(connection, GREETING.size, deadline))
            read(connection, PROOF, deadline)
            connection.sendall(proof(self._token, "server", theirs.nonce, mine.nonce))
            connection.sendall(read(connection, LARGE, deadline))

    @contextlib.contextmanager
    def _released(self) -> Iterator[None]:
        try:
            yield
        finally:
            self._slots.release()


def read(connection: socket.socket, size: int, deadline: float) -> bytes:
    """Read `size` bytes before `deadline`, a time of `time.monotonic`."""
    data = bytearray()
    while len(data) < size:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError(f"only {len(data)} of {size} bytes arrived in time")
        connection.settimeout(left)
        piece = connection.recv(min(size - len(data), 1 << 16))
        if not piece:
            raise EOFError("the other side closed the connection")
        data += piece
    return bytes(data)
