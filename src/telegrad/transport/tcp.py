"""TCP, between hosts. A connection may break while both workers are alive; the session resumes on the next one.

`TlsTransport` encrypts it. Workers use plain TCP only if their user has switched TLS off.
"""

from __future__ import annotations

import errno
import socket
import time

from telegrad.transport.addresses import parse_address
from telegrad.transport.base import Link, Listener, Transport
from telegrad.transport.socket_link import SocketLink, connect
from telegrad.transport.sockets import SocketListener

_BACKLOG = 1024


class TcpTransport(Transport):
    """Addresses are ``tcp://host:port`` and ``tcp://[ipv6]:port``; port 0 picks a free one."""

    scheme = "tcp"
    resumable = True

    def __init__(self, *, advertise: str | None = None) -> None:
        self._advertise = advertise

    def listen(self, address: str) -> Listener:
        host, port = _host_and_port(address)
        family, kind, protocol, _, where = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.socket(family, kind, protocol)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(where)
            sock.listen(_BACKLOG)
        except OSError:
            sock.close()
            raise
        return SocketListener(sock, format_tcp(self._advertise or host, sock.getsockname()[1]), self._accepted)

    def connect(self, address: str, deadline: float) -> Link:
        host, port = _host_and_port(address)
        failure: OSError = ConnectionRefusedError(f"{host} has no address")
        for family, kind, protocol, _, where in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
            sock = socket.socket(family, kind, protocol)
            try:
                sock.settimeout(max(0.001, deadline - time.monotonic()))
                connect(sock, where)
                if sock.getsockname() == sock.getpeername():
                    # The kernel chose the target as the source port, so the socket is connected to itself.
                    raise ConnectionRefusedError(errno.ECONNREFUSED, f"nobody listens at {address}")
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                return self._opened_link(sock, f"{host}:{port}", deadline)
            except OSError as error:
                sock.close()
                failure = error
            except BaseException:
                sock.close()
                raise
        raise failure

    def _accepted(self, sock: socket.socket) -> Link | None:
        try:
            host, port = sock.getpeername()[:2]
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except OSError:  # it was closed meanwhile
            sock.close()
            return None
        return self._accepted_link(sock, f"{host}:{port}")

    def _accepted_link(self, sock: socket.socket, peer: str) -> Link:
        return SocketLink(sock, peer=peer, resumable=True)

    def _opened_link(self, sock: socket.socket, peer: str, deadline: float) -> Link:
        return SocketLink(sock, peer=peer, resumable=True)


def format_tcp(host: str, port: int) -> str:
    """Return the address of a host and port, with brackets around IPv6."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def _host_and_port(address: str) -> tuple[str, int]:
    parsed = parse_address(address)
    return parsed.host, parsed.port
