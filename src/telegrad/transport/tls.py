"""TLS 1.3 over TCP. Imported only where TCP is used: unix sockets stay plain, and need no certificate."""

from __future__ import annotations

import socket
import threading

from telegrad.transport.base import Link
from telegrad.transport.certificates import Credentials, make_credentials
from telegrad.transport.tcp import TcpTransport
from telegrad.transport.tls_link import TlsLink


class TlsTransport(TcpTransport):
    """Addresses are those of TCP. Without `credentials`, a certificate is made before the first connection.

    Not earlier, because it takes 50 ms, and a group on one machine has no connection over TCP.
    """

    encrypted = True
    _beginning = b"\x16\x03"  # a TLS handshake record

    def __init__(
        self, credentials: Credentials | None = None, *, advertise: str | None = None, deferred: bool = False
    ) -> None:
        super().__init__(advertise=advertise, deferred=deferred)
        self._lock = threading.Lock()  # protects _credentials
        self._credentials = credentials

    def _prepare(self) -> None:
        self._get_credentials()

    def _get_credentials(self) -> Credentials:
        with self._lock:
            if self._credentials is None:
                self._credentials = make_credentials()
            return self._credentials

    def _accepted_link(self, sock: socket.socket, peer: str) -> Link:
        return TlsLink(sock, peer=peer, credentials=self._get_credentials(), opens=False)

    def _opened_link(self, sock: socket.socket, peer: str, deadline: float) -> Link:
        link = TlsLink(sock, peer=peer, credentials=self._get_credentials(), opens=True)
        try:
            link.open(deadline)
        except BaseException:
            link.close()
            raise
        return link
