"""TCP, between hosts. A connection may break while both workers are alive; the session resumes on the next one."""

from __future__ import annotations

import errno
import socket
import time

from telegrad.transport.addresses import parse_address
from telegrad.transport.base import Link, Listener, Transport
from telegrad.transport.socket_link import SocketLink, connect
from telegrad.transport.sockets import SocketListener

_BACKLOG = 4096  # the kernel may allow less (net.core.somaxconn)


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
        return SocketListener(sock, format_tcp(self._advertise or host, sock.getsockname()[1]), _accepted)

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
                return _link(sock, f"{host}:{port}")
            except OSError as error:
                sock.close()
                failure = error
            except BaseException:
                sock.close()
                raise
        raise failure


def format_tcp(host: str, port: int) -> str:
    """Return the address of a host and port, with brackets around IPv6."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def _accepted(sock: socket.socket) -> Link | None:
    try:
        host, port = sock.getpeername()[:2]
    except OSError:  # it was closed meanwhile
        sock.close()
        return None
    return _link(sock, f"{host}:{port}")


def _link(sock: socket.socket, peer: str) -> Link:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return SocketLink(sock, peer=peer, resumable=True)


def _host_and_port(address: str) -> tuple[str, int]:
    parsed = parse_address(address)
    return parsed.host, parsed.port
