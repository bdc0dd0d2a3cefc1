"""Connections through other workers, to a worker that cannot be connected to: TLS from end to end.

The address ``relay://46/<incarnation>`` says which families the worker itself can connect to, and who it is. How a
socket that leads there is found is not known here (`telegrad.connection.relaying`). What runs over it is the same as
over a TCP connection to the worker: a preamble for the address, TLS and the handshake. A relay sees encrypted bytes.
"""

from __future__ import annotations

import socket
from collections.abc import Callable

from telegrad.transport.addresses import parse_address
from telegrad.transport.base import Link, Listener, Transport
from telegrad.transport.preamble_verifier import PreambleVerifier
from telegrad.transport.tls import TlsTransport

FindSocket = Callable[[int, float], tuple[socket.socket, str]]
"""Returns a socket that leads to an incarnation of a worker, before a deadline, and describes it. Raises an OSError."""


def relay_address(families: str, incarnation: int) -> str:
    """Return the address of a worker that can connect to addresses of these families.

    >>> relay_address("46", 255)
    'relay://46/00000000000000ff'
    """
    return f"relay://{families}/{incarnation:016x}"


def incarnation_in(address: str) -> int:
    """Return the incarnation that an address names."""
    return int(parse_address(address).path.partition("/")[2], 16)


class RelayTransport(Transport):
    """TLS over sockets that `find_socket` finds, and at the other end over those that are passed to `accept`."""

    scheme = "relay"
    resumable = True
    encrypted = True

    def __init__(self, tls: TlsTransport) -> None:
        self.tls = tls
        self.find_socket: FindSocket
        """Set by `telegrad.connection.relaying`."""
        self._verifier: PreambleVerifier | None = None

    def listen(self, address: str) -> Listener:
        self._verifier = PreambleVerifier(self.tls.preamble_key, address)
        return _Announcement(address)

    def connect(self, address: str, deadline: float) -> Link:
        sock, peer = self.find_socket(incarnation_in(address), deadline)
        try:
            return self.tls.open_over(sock, address, peer, deadline)
        except BaseException:
            sock.close()
            raise

    def accept(self, sock: socket.socket, peer: str) -> Link:
        """Return the link of a connection that this worker opened for somebody who could not."""
        assert self._verifier is not None
        return self.tls.accept_over(sock, peer, self._verifier)


class _Announcement(Listener):
    """The address of a worker that opens its incoming connections itself. There is nothing to poll."""

    is_open = False

    def __init__(self, address: str) -> None:
        self.address = address

    def accept(self) -> Link | None:
        return None

    def close(self) -> None:
        """Do nothing: nothing listens."""

    def abandon(self) -> None:
        """Do nothing: nothing listens."""
