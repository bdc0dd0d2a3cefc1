"""A TLS client for tests that write raw bytes to a worker: it accepts any certificate, as an attacker would."""

from __future__ import annotations

import socket
import ssl


def wrap(sock: socket.socket) -> ssl.SSLSocket:
    """Perform the TLS handshake on a connected socket. A connection that just ends reads as end of file."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context.wrap_socket(sock)
