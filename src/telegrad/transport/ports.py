"""The TCP ports that a worker may listen on, for firewalls: ``TELEGRAD_PORTS=29600-29663``.

A port is taken in two rounds. The first asks the kernel for one that no socket has at all. The second also takes one
that only connections of an earlier process still hold, as after the restart of a worker that has one port. Two sockets
could share such a port until one of them listens, so the socket listens at once there.
"""

from __future__ import annotations

import errno
import re
import socket
from collections.abc import Sequence
from typing import Any

from telegrad.errors import TelegradError

PORTS_VARIABLE = "TELEGRAD_PORTS"
BACKLOG = 4096
"""Connections that wait to be accepted. The kernel may allow less (net.core.somaxconn)."""
_RANGE = re.compile(r"([0-9]{1,5})(?:-([0-9]{1,5}))?\Z", re.ASCII)


def parse_ports(text: str, source: str = PORTS_VARIABLE) -> tuple[int, ...]:
    """Return the ports that a text lists, in its order. Raises a ValueError that names the `source` of the text.

    >>> parse_ports("29600-29602, 443")
    (29600, 29601, 29602, 443)
    """
    ports: dict[int, None] = {}
    for part in text.split(","):
        found = _RANGE.match(part.strip())
        low, high = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
        if not 1 <= low <= high <= 0xFFFF:
            raise ValueError(
                f"{source} is {text!r}: it must list ports from 1 to 65535, as in 29600-29663 or 443,29600"
            )
        ports.update(dict.fromkeys(range(low, high + 1)))
    return tuple(ports)


def describe_ports(ports: Sequence[int]) -> str:
    """Return ports as `parse_ports` reads them."""
    runs: list[list[int]] = []
    for port in ports:
        if runs and port == runs[-1][1] + 1:
            runs[-1][1] = port
        else:
            runs.append([port, port])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in runs)


def make_socket(kind: tuple[int, int, int], *, only_ipv6: bool) -> socket.socket:
    """Return a socket of a family, a type and a protocol; `only_ipv6` says that it does not take IPv4 connections."""
    sock = socket.socket(*kind)
    if only_ipv6 and kind[0] == socket.AF_INET6:
        sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
    return sock


def bind_in_range(
    kind: tuple[int, int, int],
    where: tuple[Any, ...],
    ports: Sequence[int],
    *,
    only_ipv6: bool = False,
    dual_stack: bool = False,
) -> tuple[socket.socket, bool]:
    """Return a socket at the first free one of `ports`, and whether it had to listen already.

    `where` is an address of the family, whose port does not count. With `dual_stack`, a socket of IPv6 takes IPv4
    connections, too. Raises a TelegradError if all ports are in use.
    """
    for reuses in (False, True):
        for port in ports:
            sock = make_socket(kind, only_ipv6=only_ipv6)
            try:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, int(reuses))
                if dual_stack:
                    sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
                sock.bind((where[0], port, *where[2:]))
                if reuses:
                    sock.listen(BACKLOG)
            except OSError as error:
                sock.close()
                if error.errno not in (errno.EADDRINUSE, errno.EACCES):  # EACCES: a port that only root may use
                    raise
            else:
                return sock, reuses
    raise TelegradError(
        f"no port is free at {where[0] or 'any address'} of those that {PORTS_VARIABLE} or the option ports allows "
        f"({describe_ports(ports)}): allow one for each worker of this machine, or end the programs that use them "
        "(`ss -tlnp` lists them)"
    )
