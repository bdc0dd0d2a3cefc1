"""Chooses where a worker listens and which address it advertises.

Two rules:

1. A worker listens on the interface that faces the rendezvous: on its IPv4 and its IPv6 address, if it has both. It
   listens on all interfaces only if it is asked to.
2. Unix sockets are in a directory that no other user can write to. Only workers with equal `host_identity` use them.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import ipaddress
import os
import re
import socket
import stat
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from telegrad.errors import TelegradError

MAX_SUN_PATH = 107
"""The longest path of a unix socket, in bytes: sockaddr_un.sun_path has 108, including the terminating zero."""

NEW_SUFFIX = ".new"
"""What a unix socket ends with until it listens."""
_ACCEPTS = "00010000"  # the flags of a listening socket in /proc/net/unix

INTERFACE_VARIABLES = ("TELEGRAD_INTERFACE", "TP_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
"""The first one that is set counts. Programs for PyTorch's RPC set the last two."""

_SIOCGIFADDR = 0x8915
_LINK = 0x20  # the scope of an IPv6 address that is valid on its link only
_TEMPORARY = 0x01  # flags of IPv6 addresses; such an address changes once a day
_UNUSABLE = 0x08 | 0x20 | 0x40  # another machine has it, it is deprecated, or it is still being checked
_HOST_NAME = re.compile(r"[0-9A-Za-z._-]{1,255}\Z")
_MEMORY_NAME = re.compile(r"[0-9A-Za-z._:/@%-]{1,255}\Z")
_RELAYED = re.compile(r"(4|6|46)/[0-9a-f]{16}\Z")
_PORT = re.compile(r"[0-9]{1,5}\Z", re.ASCII)
_LOOPBACK = "127.0.0.1"
_REMEDY = "set TELEGRAD_INTERFACE to a network interface, or pass the address to advertise"


@dataclass(frozen=True)
class Address:
    """An address where a worker listens. ``str()`` returns the text that `parse_address` reads."""

    scheme: Literal["tcp", "unix", "memory", "relay"]
    host: str = ""
    """For tcp: a name or an IP address, IPv6 without brackets."""
    port: int = 0
    """For tcp."""
    path: str = ""
    """For unix: an absolute path. For memory: a name. For relay: the families that the worker can connect to (4, 6 or
    46), a slash, and its incarnation in hexadecimal digits."""

    def __str__(self) -> str:
        if self.scheme == "tcp":
            return f"tcp://[{self.host}]:{self.port}" if ":" in self.host else f"tcp://{self.host}:{self.port}"
        return f"{self.scheme}://{self.path}"


def parse_address(text: str) -> Address:
    """Parse an address. Raises a ValueError that says what is wrong with it.

    >>> parse_address("tcp://[fe80::1%eth0]:1234")
    Address(scheme='tcp', host='fe80::1%eth0', port=1234, path='')
    """
    scheme, found, rest = text.partition("://")
    if found and scheme == "tcp":
        return _parse_tcp(text, rest)
    if found and scheme == "unix":
        if not rest.startswith("/") or "\0" in rest:
            raise ValueError(
                f"invalid address {text!r}: a unix socket needs an absolute path, as in unix:///run/a.sock"
            )
        if len(os.fsencode(rest)) > MAX_SUN_PATH:
            raise ValueError(f"invalid address {text!r}: the path of a unix socket has at most {MAX_SUN_PATH} bytes")
        return Address("unix", path=rest)
    if found and scheme == "memory":
        if not _MEMORY_NAME.match(rest):
            raise ValueError(
                f"invalid address {text!r}: the name is missing or has invalid characters; use a name as in memory://a"
            )
        return Address("memory", path=rest)
    if found and scheme == "relay":
        if not _RELAYED.match(rest):
            raise ValueError(f"invalid address {text!r}: it must be as in relay://46/1f2e3d4c5b6a7988")
        return Address("relay", path=rest)
    raise ValueError(f"invalid address {text!r}: it must begin with tcp://, unix://, relay:// or memory://")


def _parse_tcp(text: str, rest: str) -> Address:
    host, colon, port = rest.rpartition(":")
    if not colon or not _PORT.match(port) or int(port) > 0xFFFF:
        raise ValueError(f"invalid address {text!r}: it must end with ':' and a port from 0 to 65535")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
        try:
            ipaddress.IPv6Address(host)
        except ValueError as error:
            raise ValueError(
                f"invalid address {text!r}: the text in brackets is not an IPv6 address ({error})"
            ) from error
    elif ":" in host:
        raise ValueError(f"invalid address {text!r}: IPv6 addresses need brackets, as in tcp://[::1]:1234")
    elif not _HOST_NAME.match(host):
        raise ValueError(f"invalid address {text!r}: {host!r} is not a host name or IP address")
    return Address("tcp", host=host, port=int(port))


def host_identity(runtime_dir: Path) -> str:
    """Return a string that is equal for two processes only if they can reach each other's sockets in `runtime_dir`.

    Containers on one machine share the boot id but not the file system, and bind mounts may show one directory at
    two paths. So the identity includes the directory (device and inode) and its path, besides boot id and user. It may
    still be wrong, as for copies of a virtual machine; see `telegrad.transport.base.Transport.reaches`.
    """
    try:
        machine = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        machine = f"{socket.gethostname()} {os.getuid()}"
    directory = runtime_dir.resolve(strict=True)
    status = directory.stat()
    # Users of two user namespaces may have one number and be different users.
    users = os.readlink("/proc/self/ns/user") if os.path.islink("/proc/self/ns/user") else ""
    parts = (machine, users, str(os.geteuid()), str(status.st_dev), str(status.st_ino), str(directory))
    return hashlib.blake2b("\0".join(parts).encode("utf-8", "surrogateescape"), digest_size=12).hexdigest()


def route_address(host: str, port: int) -> str:
    """Return this machine's IP address on the route to `host`. Nothing is sent.

    If the name of the host resolves to loopback here (Debian maps a machine's own name to it), this is a loopback
    address. A group with other machines then needs an interface or an advertised address.
    """
    problem = "the name does not resolve"
    try:
        # Connecting a UDP socket only asks the kernel for a route. It needs a port, and any will do.
        candidates = socket.getaddrinfo(host, port or 9, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError) as error:
        raise TelegradError(f"cannot find a route to {host!r}: {error}; {_REMEDY}") from error
    for family, kind, protocol, _, target in candidates:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(target)
                found = probe.getsockname()
                # The address of a link is ambiguous without its interface.
                is_scoped = family == socket.AF_INET6 and found[3] and "%" not in found[0]
                return f"{found[0]}%{socket.if_indextoname(found[3])}" if is_scoped else str(found[0])
        except OSError as error:
            problem = str(error)
    raise TelegradError(f"cannot find a route to {host!r}: {problem}; {_REMEDY}")


def interface_addresses(name: str) -> list[str]:
    """Return the IPv4 address of a network interface and its IPv6 address with the widest scope, as far as it has them.

    An IPv6 address that is valid on its link only counts if there is no other.
    """
    existing = [interface for _, interface in socket.if_nameindex()]
    if name not in existing:
        raise TelegradError(
            f"network interface {name!r} does not exist on this machine; use one of {', '.join(existing)}"
        )
    ipv4, ipv6 = _ipv4_address(name), _ipv6_address(name)
    if ipv6 is not None and "%" in ipv6 and ipv4 is not None:
        ipv6 = None
    found = [address for address in (ipv4, ipv6) if address is not None]
    if not found:
        raise TelegradError(f"network interface {name!r} has no IP address; use one of {', '.join(existing)}")
    return found


def _ipv4_address(interface: str) -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            reply = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", os.fsencode(interface)))
        except OSError as error:
            if error.errno not in (errno.EADDRNOTAVAIL, errno.ENODEV):
                raise
            return None
    return socket.inet_ntoa(reply[20:24])


def _ipv6_address(interface: str) -> str | None:
    candidates = []
    for name, address, scope, flags in _ipv6_table():
        if name == interface and not flags & _UNUSABLE:
            candidates.append((scope, flags & _TEMPORARY, address))
    # The kernel's scopes: 0 is global, 0x10 the host, 0x20 the link. A link address needs its interface.
    return min(candidates)[2] if candidates else None


def _ipv6_table() -> Iterator[tuple[str, str, int, int]]:
    """Yield the IPv6 addresses of this machine: interface, address, scope and flags."""
    try:
        lines = Path("/proc/net/if_inet6").read_text().splitlines()
    except FileNotFoundError:
        return  # a kernel without IPv6
    for line in lines:
        digits, _, _, scope, flags, name = line.split()
        address = str(ipaddress.IPv6Address(bytes.fromhex(digits)))
        yield name, f"{address}%{name}" if int(scope, 16) == _LINK else address, int(scope, 16), int(flags, 16)


def _with_other_family(address: str) -> list[str]:
    """Return an address of this machine and, if its interface has one, the address of the other family.

    Not for loopback: who uses it reaches this machine over it already.
    """
    if ipaddress.ip_address(address).is_loopback:
        return [address]
    if ":" in address:
        names = [name for name, found, _, _ in _ipv6_table() if found == address]
    else:
        names = [name for _, name in socket.if_nameindex() if _ipv4_address(name) == address]
    for name in names:
        other = _ipv4_address(name) if ":" in address else _ipv6_address(name)
        if other is not None and "%" not in other:
            return [address, other]
    return [address]


def choose_addresses(
    *,
    rendezvous_host: str | None,
    rendezvous_port: int | None,
    bind: str | None = None,
    advertise: str | None = None,
    interface: str | None = None,
    environ: Mapping[str, str] = os.environ,
) -> list[tuple[str, str]]:
    """Return the hosts to listen on, each with the host to advertise for it.

    Explicit addresses come first, then an interface, then the route to the rendezvous. Without any of them (a
    rendezvous over a file) it is loopback. `bind` and `advertise` may be several, separated by commas.
    """
    binds, advertised = _listed(bind), _listed(advertise)
    for host in advertised:
        if _is_wildcard(host):
            raise TelegradError(
                f"cannot advertise {host!r}: nobody can connect to it; advertise an address of this machine, or none"
            )
    if advertised and binds and len(binds) != len(advertised):
        raise TelegradError(
            f"bind ({bind}) and advertise ({advertise}) must have as many addresses: each one listens for the other"
        )
    if advertised:
        return list(zip(binds or advertised, advertised, strict=True))
    if binds and not any(map(_is_wildcard, binds)):
        return [(host, host) for host in binds]
    found = _interface_or_route(rendezvous_host, rendezvous_port, interface, environ)
    if not binds:
        return [(host, host) for host in found]
    # The wildcard of IPv6 is for both families, as everywhere.
    wildcards = {host: "::" if ":" in host else "0.0.0.0" for host in found if ":" not in host or "::" in binds}
    if not wildcards:
        raise TelegradError(
            f"bind={bind!r} listens for IPv4 only, and this machine reaches the rendezvous over IPv6 ({found[0]}): use "
            "bind='::'"
        )
    return [(wildcard, host) for host, wildcard in wildcards.items()]


def _listed(hosts: str | None) -> list[str]:
    return [] if hosts is None else [host.strip() for host in hosts.split(",")]


def _is_wildcard(host: str) -> bool:
    return host in ("", "*", "0.0.0.0", "::")


def _interface_or_route(
    host: str | None, port: int | None, interface: str | None, environ: Mapping[str, str]
) -> list[str]:
    if interface is not None:
        return _first_interface(interface, "the argument")
    for variable in INTERFACE_VARIABLES:
        if environ.get(variable):
            return _first_interface(environ[variable], variable)
    return [_LOOPBACK] if host is None else _with_other_family(route_address(host, port or 0))


def _first_interface(names: str, source: str) -> list[str]:
    existing = [name for _, name in socket.if_nameindex()]
    for name in names.split(","):
        if name.strip() in existing:
            return interface_addresses(name.strip())
    raise TelegradError(
        f"no network interface of this machine is listed in {source} ({names!r}); use one of {', '.join(existing)}"
    )


def socket_path(directory: Path, name: str, incarnation: int) -> Path:
    """Return the path of the socket of worker `name`: readable if there is room, and unique to the incarnation."""
    digest = hashlib.blake2b(f"{name}\0{incarnation}".encode(), digest_size=8).hexdigest()
    room = MAX_SUN_PATH - len(os.fsencode(directory)) - len(f"/{digest}.sock")
    if room < 0:
        raise TelegradError(
            f"the path of directory {directory} is too long for a unix socket (at most {MAX_SUN_PATH} bytes in all); "
            "set TELEGRAD_RUNTIME_DIR to a shorter one"
        )
    stem = re.sub(r"[^0-9A-Za-z_-]", "-", name)[: min(room - 1, 32)] if room > 1 else ""
    return directory / (f"{stem}-{digest}.sock" if stem else f"{digest}.sock")


OBSERVE_SUFFIX = ".observe.sock"
"""How the names of the sockets end at which observers of this user may look at a worker."""


def observe_address(address: str) -> str:
    """Return where observers of this host find the worker whose unix socket has this address.

    >>> observe_address("unix:///run/a-1f.sock")
    'unix:///run/a-1f.observe.sock'
    """
    return address.removesuffix(".sock") + OBSERVE_SUFFIX


def remove_dead_sockets(directory: Path) -> list[Path]:
    """Remove the sockets that killed workers left in `directory`, and return them.

    A socket is bound under a temporary name without ``.sock``, starts to listen, and is renamed only then. So the
    ``.sock`` of a live worker never refuses a connection, and a worker whose socket refuses one is dead. Its name is
    not reused, because it contains the incarnation. Workers that the kernel lists are not connected to: otherwise every
    worker of a group would connect to all others when it starts. A live worker in another network namespace, which is
    not listed, sees a connection that closes at once.
    """
    removed = []
    sockets = sorted(directory.glob("*.sock"))
    alive = _listening_sockets() if sockets else frozenset()
    for path in sockets:
        if str(path.with_suffix(NEW_SUFFIX)) not in alive and _is_dead_socket(path):
            try:
                path.unlink()
            except FileNotFoundError:
                continue  # another worker removes it at the same time
            removed.append(path)
    return removed


def _listening_sockets() -> frozenset[str]:
    """Return the names under which the unix sockets of this network namespace were bound that listen."""
    try:
        lines = Path("/proc/net/unix").read_text(errors="surrogateescape").splitlines()
    except OSError:
        return frozenset()  # not Linux: every socket is tried
    entries = [line.split(maxsplit=7) for line in lines]
    return frozenset(entry[7] for entry in entries if len(entry) == 8 and entry[3] == _ACCEPTS)


def _is_dead_socket(path: Path) -> bool:
    try:
        status = path.lstat()
        if not stat.S_ISSOCK(status.st_mode) or status.st_uid != os.geteuid():
            return False
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            # If the backlog is full, the worker is busy, not dead, and must not block us.
            probe.setblocking(False)
            probe.connect(str(path))
    except OSError as error:
        return error.errno == errno.ECONNREFUSED
    return False
