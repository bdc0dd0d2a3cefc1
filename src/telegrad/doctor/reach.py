"""Can this machine reach others, and how: names, TCP over IPv4 and IPv6, large packets, token, clock."""

from __future__ import annotations

import hmac
import os
import socket
import time
from dataclasses import dataclass, replace

from telegrad.doctor.finding import Finding, ok
from telegrad.doctor.listener import read
from telegrad.doctor.probe_protocol import GREETING, LARGE, PROOF, Greeting, decode_greeting, proof

DEFAULT_PORT = 29500
MAX_SKEW = 2.0
"""Seconds by which clocks may differ."""
_FAMILIES = {socket.AF_INET: "IPv4", socket.AF_INET6: "IPv6"}


@dataclass(frozen=True)
class Target:
    """A host to reach, and a port there."""

    host: str
    port: int = DEFAULT_PORT


def parse_targets(text: str) -> list[Target]:
    """Return the hosts of a list.

    >>> parse_targets("a,b:29600,[fe80::1]:4")
    [Target(host='a', port=29500), Target(host='b', port=29600), Target(host='fe80::1', port=4)]
    """
    found = []
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        host, colon, port = part.rpartition(":")
        if not colon or part.endswith("]") or (":" in host and not host.startswith("[")):
            host, port = part, str(DEFAULT_PORT)
        if not port.isdecimal() or not 0 < int(port) <= 0xFFFF:
            raise ValueError(f"{part!r} is not a host, or a host and a port as in a:29500")
        found.append(Target(host.strip("[]"), int(port)))
    return found


def check_host(target: Target, token: bytes | None, timeout: float) -> list[Finding]:
    """Check whether a host can be reached, over every address that it has."""
    check = f"host {target.host}"
    try:
        entries = socket.getaddrinfo(target.host, target.port, type=socket.SOCK_STREAM)
    except (socket.gaierror, UnicodeError) as error:
        return [
            Finding(
                check,
                "problem",
                f"its name is unknown here ({error})",
                "use its IP address, or enter the name in /etc/hosts or the name server of every machine",
            )
        ]
    addresses = list(dict.fromkeys((family, address) for family, _, _, _, address in entries))
    findings: list[Finding] = []
    unreachable: list[int] = []
    for number, (family, address) in enumerate(addresses):
        try:
            findings.append(_check_address(check, family, address, token, timeout))
        except _Unreachable as found:
            findings.append(Finding(check, "problem", found.text, found.remedy))
            unreachable.append(number)
    if len(unreachable) < len(findings):  # one family is enough: a worker is reached over what works
        for number in unreachable:
            findings[number] = replace(findings[number], level="warning")
    return findings


class _Unreachable(Exception):
    """No path leads to an address."""

    def __init__(self, text: str, remedy: str) -> None:
        super().__init__(text)
        self.text, self.remedy = text, remedy


def _check_address(
    check: str, family: socket.AddressFamily, address: tuple[object, ...], token: bytes | None, timeout: float
) -> Finding:
    """Return what is found at an address. Raises `_Unreachable` if it is not reached."""
    where = f"tcp over {_FAMILIES.get(family, family.name)} ({address[0]} port {address[1]})"
    start = time.monotonic()
    try:
        with socket.socket(family, socket.SOCK_STREAM) as connection:
            connection.settimeout(timeout)
            connection.connect(address)
            took = time.monotonic() - start
            return _converse(check, where, connection, token, took, timeout)
    except ConnectionRefusedError:
        return ok(check, f"{where}: the machine can be reached; nothing listens at this port")
    except TimeoutError as error:
        raise _Unreachable(
            f"{where}: no answer within {timeout:g} s, as if a firewall dropped the packets or the machine were down",
            "open the port in the firewall (TELEGRAD_PORTS fixes those of workers), and check the route "
            f"(`ping {address[0]}`); a worker that nobody can connect to needs inbound=False",
        ) from error
    except OSError as error:
        raise _Unreachable(
            f"{where}: {error.strerror or error}", f"check the route (`ip route get {address[0]}`) and the address"
        ) from error


def _converse(
    check: str, where: str, connection: socket.socket, token: bytes | None, took: float, timeout: float
) -> Finding:
    """Talk to the doctor at the other end, if there is one."""
    deadline = time.monotonic() + timeout
    mine = Greeting(os.urandom(16), time.time())
    try:
        theirs = decode_greeting(read(connection, GREETING.size, deadline))
    except (EOFError, TimeoutError, ValueError, ConnectionResetError):
        return ok(check, f"{where}: something listens ({took * 1000:.1f} ms), but no `telegrad doctor --listen` to ask")
    skew = theirs.time - time.time()
    try:
        connection.sendall(mine.encode() + proof(token, "client", mine.nonce, theirs.nonce))
        received = read(connection, PROOF, deadline)
        connection.sendall(bytes(LARGE))
        read(connection, LARGE, time.monotonic() + timeout)
    except (TimeoutError, EOFError, ConnectionResetError) as error:
        raise _Unreachable(
            f"{where}: small messages get through and {LARGE // 1024} KiB do not, which is typical of a path with a "
            "smaller MTU than its ends have (a VPN, an overlay network)",
            "lower the MTU of the interface (`ip link set DEV mtu 1400`), or let ICMP 'fragmentation needed' through",
        ) from error
    if not hmac.compare_digest(received, proof(token, "server", mine.nonce, theirs.nonce)):
        return Finding(
            check,
            "problem",
            f"{where}: it answers, and has another group token than this machine, or none",
            "set the same TELEGRAD_TOKEN or TELEGRAD_TOKEN_FILE on both",
        )
    if abs(skew) > MAX_SKEW:
        return Finding(
            check,
            "warning",
            f"{where}: it answers, and its clock is {abs(skew):.0f} s {'ahead of' if skew > 0 else 'behind'} this one",
            "synchronize the clocks of both machines (chronyd, ntpd or systemd-timesyncd)",
        )
    proved = "same token" if token is not None else "no token"
    return ok(check, f"{where}: {took * 1000:.1f} ms to connect, large messages pass, {proved}, clocks agree")
