"""TLS 1.3 over TCP. Imported only where TCP is used: unix sockets stay plain, and need no certificate."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Mapping, Sequence
from functools import partial

from telegrad.transport.base import Link
from telegrad.transport.certificates import Credentials, make_credentials
from telegrad.transport.preamble_verifier import PreambleVerifier
from telegrad.transport.tcp import TcpListener, TcpTransport
from telegrad.transport.tls_link import TlsLink
from telegrad.wire.preamble import NONCE_SIZE, pack_preamble


class TlsTransport(TcpTransport):
    """Addresses are those of TCP. With `preamble_key`, workers of one group recognize each other before TLS.

    Without `credentials`, a certificate is made before the first connection. Not earlier, because it takes 50 ms, and a
    group on one machine has no connection over TCP.
    """

    encrypted = True

    def __init__(
        self,
        preamble_key: bytes,
        credentials: Credentials | None = None,
        *,
        advertise: str | Mapping[str, str] = "",
        deferred: bool = False,
        ports: Sequence[int] = (),
    ) -> None:
        super().__init__(advertise=advertise, deferred=deferred, ports=ports)
        self.preamble_key = preamble_key
        self._lock = threading.Lock()  # protects _credentials
        self._credentials = credentials

    def _prepare(self) -> None:
        self._get_credentials()

    def _get_credentials(self) -> Credentials:
        with self._lock:
            if self._credentials is None:
                self._credentials = make_credentials()
            return self._credentials

    def _make_listener(self, sock: socket.socket, address: str) -> TcpListener:
        verifier = PreambleVerifier(self.preamble_key, address)
        make_link = partial(self._make_accepted_link, verifier)
        return TcpListener(sock, address, self._prepare, make_link, verifier.is_valid_beginning)

    def accept_over(self, sock: socket.socket, peer: str, verifier: PreambleVerifier) -> Link:
        """Return the listener's side of a link over a connected socket."""
        return self._make_accepted_link(verifier, sock, peer)

    def open_over(self, sock: socket.socket, address: str, peer: str, deadline: float) -> Link:
        """Open a link to the worker at `address` over a connected socket that leads there."""
        return self._open_link(sock, address, peer, deadline)

    def _make_accepted_link(self, verifier: PreambleVerifier, sock: socket.socket, peer: str) -> Link:
        return TlsLink(sock, peer=peer, credentials=self._get_credentials(), preamble=verifier)

    def _open_link(self, sock: socket.socket, address: str, peer: str, deadline: float) -> Link:
        preamble = pack_preamble(self.preamble_key, os.urandom(NONCE_SIZE), address)
        link = TlsLink(sock, peer=peer, credentials=self._get_credentials(), preamble=preamble)
        try:
            link.open(deadline)
        except BaseException:
            link.close()
            raise
        return link
