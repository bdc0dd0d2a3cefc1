"""Two connected TLS links in one process, and a client that can send TLS messages which Python's ssl cannot."""

from __future__ import annotations

import ctypes
import os
import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.redirection import rerouted

from telegrad.errors import AuthenticationError, ProtocolError
from telegrad.transport.base import Link, LinkClosed, Listener
from telegrad.transport.certificates import Credentials
from telegrad.transport.tls import TlsTransport
from telegrad.transport.tls_link import TlsLink
from telegrad.wire.frames import Frame, Kind, Limits
from telegrad.wire.preamble import NONCE_SIZE, pack_preamble

PATIENCE = 30.0
KEY = b"the key of a group for preambles"


def soon() -> float:
    return time.monotonic() + PATIENCE


@contextmanager
def listening(credentials: Credentials | None = None) -> Iterator[Listener]:
    listener = TlsTransport(KEY, credentials).listen("tcp://127.0.0.1:0")
    try:
        yield listener
    finally:
        listener.close()


def accept(listener: Listener) -> TlsLink:
    """Return the next connection."""
    deadline = soon()
    while (link := listener.accept()) is None:
        assert time.monotonic() < deadline
    assert isinstance(link, TlsLink)
    return link


class Connecting(threading.Thread):
    """Connects to an address on another thread, because the other end has to take part. `relay` is in between."""

    def __init__(
        self,
        address: str,
        credentials: Credentials | None = None,
        *,
        key: bytes = KEY,
        relay: str | None = None,
        patience: float = PATIENCE,
    ) -> None:
        super().__init__()
        self._transport, self._address, self._relay = TlsTransport(key, credentials), address, relay
        self._deadline = time.monotonic() + patience
        self.link: TlsLink | None = None
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        """Connect."""
        try:
            with rerouted(self._transport, self._address, self._relay or self._address):
                link = self._transport.connect(self._address, self._deadline)
            assert isinstance(link, TlsLink)
            self.link = link
        except BaseException as error:  # noqa: BLE001 - the test looks at it
            self.error = error


@contextmanager
def connected(
    mine: Credentials | None = None, theirs: Credentials | None = None, *, admitted: bool = True
) -> Iterator[tuple[TlsLink, TlsLink]]:
    """Yield the connecting and the accepting end of a connection."""
    with listening(theirs) as listener:
        connecting = Connecting(listener.address, mine)
        there = accept(listener)
        while connecting.is_alive():
            assert not list(there.receive())
            connecting.join(0.001)
        here = connecting.link
        assert here is not None, connecting.error
        here.send(Kind.HANDSHAKE, b"", 0, 0, 0)
        while not list(there.receive()):
            there.wait(soon())
        if admitted:
            for link in (here, there):
                link.admit(Limits(), lambda sequence, length: memoryview(bytearray(length)))
        try:
            yield here, there
        finally:
            here.close()
            there.close()


def preamble_for(listener: Listener, key: bytes = KEY) -> bytes:
    """Return a preamble that was not used yet."""
    return pack_preamble(key, os.urandom(NONCE_SIZE), listener.address)


class RawClient:
    """A TLS client made of OpenSSL's own functions, which asks for new keys as often as it likes."""

    def __init__(self, sock: socket.socket, preamble: bytes) -> None:
        sock.sendall(preamble)
        found = re.search(r"\S*/libssl\.so\.3", Path("/proc/self/maps").read_text())
        assert found is not None, "Python's ssl is not built with OpenSSL 3"
        self._library = library = ctypes.CDLL(found[0])
        for name in ("TLS_client_method", "SSL_CTX_new", "SSL_new"):
            getattr(library, name).restype = ctypes.c_void_p
        self._context = ctypes.c_void_p(library.SSL_CTX_new(ctypes.c_void_p(library.TLS_client_method())))
        self._ssl = ctypes.c_void_p(library.SSL_new(self._context))
        library.SSL_set_fd(self._ssl, sock.fileno())

    def connect(self) -> None:
        """Perform the TLS handshake, which blocks."""
        assert self._library.SSL_connect(self._ssl) == 1

    def update_keys(self) -> bool:
        """Ask the peer for new keys. Return False if that failed, because the connection is closed."""
        asked = self._library.SSL_key_update(self._ssl, 1) == 1
        return asked and self._library.SSL_do_handshake(self._ssl) == 1

    def write(self, data: bytes) -> bool:
        """Send data."""
        return int(self._library.SSL_write(self._ssl, data, len(data))) == len(data)

    def read(self, count: int) -> bytes:
        """Return up to `count` bytes of data."""
        buffer = ctypes.create_string_buffer(count)
        got = self._library.SSL_read(self._ssl, buffer, count)
        return buffer.raw[: max(0, got)]

    def close(self) -> None:
        """Free what OpenSSL holds."""
        self._library.SSL_free(self._ssl)
        self._library.SSL_CTX_free(self._context)


def read(link: Link, count: int, sender: Link | None = None) -> list[Frame]:
    """Read at least `count` frames. Pass `sender` if no other thread flushes the sending end."""
    frames: list[Frame] = []
    deadline = soon()
    while len(frames) < count:
        assert time.monotonic() < deadline
        link.wait(deadline if sender is None or not sender.unsent() else time.monotonic())
        if sender is not None:
            sender.flush()
        frames.extend(link.receive())
    return frames


def read_to_the_end(link: Link) -> Exception:
    """Return the error that ends a link on which no more frames arrive."""
    deadline = soon()
    while time.monotonic() < deadline:
        link.wait(deadline)
        try:
            assert not list(link.receive())
        except (LinkClosed, ProtocolError, AuthenticationError) as error:
            return error
    raise AssertionError("the link did not end")
