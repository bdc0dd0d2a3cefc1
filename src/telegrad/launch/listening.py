"""Sockets on which a launcher, its runners and its stores listen, on ports that ``TELEGRAD_PORTS`` allows."""

from __future__ import annotations

import socket

from telegrad.transport.ports import bind_in_range, parse_ports

LOOPBACK = "127.0.0.1"
_BACKLOG = 1024


def listen(ports: str, *, loopback: bool) -> socket.socket:
    """Return a socket that listens on the loopback address or on all addresses, IPv6 ones too if there are any.

    `ports` is a list as in ``29600-29663``, or empty: the system chooses. Raises a ValueError if the list cannot be
    read, and a TelegradError if all its ports are in use.
    """
    dual = not loopback and socket.has_dualstack_ipv6()
    family, host = (socket.AF_INET6, "::") if dual else (socket.AF_INET, LOOPBACK if loopback else "")
    if not ports.strip():
        return socket.create_server((host, 0), family=family, backlog=_BACKLOG, dualstack_ipv6=dual)
    sock, listens = bind_in_range((family, socket.SOCK_STREAM, 0), (host, 0), parse_ports(ports), dual_stack=dual)
    if not listens:
        sock.listen(_BACKLOG)
    return sock
