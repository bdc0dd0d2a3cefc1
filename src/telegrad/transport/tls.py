"""TLS 1.3 over TCP. Imported only where TCP is used: unix sockets stay plain, and need no certificate."""

from __future__ import annotations

import socket

from telegrad.transport.base import Link
from telegrad.transport.certificates import Credentials, make_credentials
from telegrad.transport.tcp import TcpTransport
from telegrad.transport.tls_link import TlsLink


class TlsTransport(TcpTransport):
    """Addresses are those of TCP. Without `credentials`, a certificate is made on the spot."""

    encrypted = True

    def __init__(self, credentials: Credentials | None = None, *, advertise: str | None = None) -> None:
        super().__init__(advertise=advertise)
        self._credentials = credentials or make_credentials()

    def _accepted_link(self, sock: socket.socket, peer: str) -> Link:
        return TlsLink(sock, peer=peer, credentials=self._credentials, opens=False)

    def _opened_link(self, sock: socket.socket, peer: str, deadline: float) -> Link:
        link = TlsLink(sock, peer=peer, credentials=self._credentials, opens=True)
        try:
            link.open(deadline)
        except BaseException:
            link.close()
            raise
        return link
