"""A TLS client for tests that write raw bytes to a worker: it accepts any certificate, as an attacker would."""

from __future__ import annotations

import os
import socket
import ssl

from telegrad.connection.group_keys import derive_keys
from telegrad.testing.group import TOKEN
from telegrad.wire.preamble import NONCE_SIZE, pack_preamble


def preamble_for(address: str, token: bytes = TOKEN) -> bytes:
    """Return a preamble that was not used yet, of somebody who knows `token` and dials `address`."""
    return pack_preamble(derive_keys(token).preamble, os.urandom(NONCE_SIZE), address)


def wrap(sock: socket.socket, preamble: bytes) -> ssl.SSLSocket:
    """Send a preamble, and perform the TLS handshake. A connection that just ends reads as end of file."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    sock.sendall(preamble)
    return context.wrap_socket(sock)
