"""Decides where a worker listens and what it tells others, since a wrong answer lets strangers in or keeps peers out.

Two rules:

1. A worker listens on one address that its peers can reach, never on all of them unless it is asked to.
2. Unix sockets live in a directory that no other user can write, and only workers with equal `host_identity` use them.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import ipaddress
import os
import re
import shlex
import socket
import stat
import struct
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from telegrad.errors import TelegradError

MAX_SUN_PATH = 107
"""What fits, in bytes, into the 108 of sockaddr_un.sun_path with its closing zero."""

INTERFACE_VARIABLES = ("TELEGRAD_INTERFACE", "TP_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
"""The first that is set decides. The last two are what programs for PyTorch's RPC set already."""

_SIOCGIFADDR = 0x8915
_HOST_NAME = re.compile(r"[0-9A-Za-z._-]{1,255}\Z")
_MEMORY_NAME = re.compile(r"[0-9A-Za-z._:/@%-]{1,255}\Z")
_PORT = re.compile(r"[0-9]{1,5}\Z", re.ASCII)
_LOOPBACK = "127.0.0.1"
_WHAT_TO_SET = "set TELEGRAD_INTERFACE to a network interface, or give the address to advertise"


@dataclass(frozen=True)
class Address:
    """One place where a worker listens. ``str()`` gives the text that `parse_address` reads."""

    scheme: Literal["tcp", "unix", "memory"]
    host: str = ""
    """Of tcp: a name or an IP address, IPv6 without brackets."""
    port: int = 0
    """Of tcp."""
    path: str = ""
    """Of unix: an absolute path. Of memory: a name."""

    def __str__(self) -> str:
        if self.scheme == "tcp":
            return f"tcp://[{self.host}]:{self.port}" if ":" in self.host else f"tcp://{self.host}:{self.port}"
        return f"{self.scheme}://{self.path}"


def parse_address(text: str) -> Address:
    """Return the address that `text` names, or raise a ValueError that says what is wrong with it.

    >>> parse_address("tcp://[fe80::1%eth0]:1234")
    Address(scheme='tcp', host='fe80::1%eth0', port=1234, path='')
    """
    scheme, found, rest = text.partition("://")
    if found and scheme == "tcp":
        return _parse_tcp(text, rest)
    if found and scheme == "unix":
        if not rest.startswith("/") or "\0" in rest:
            raise ValueError(f"{text!r} is no address: a unix socket needs an absolute path, as in unix:///run/a.sock")
        if len(os.fsencode(rest)) > MAX_SUN_PATH:
            raise ValueError(f"{text!r} is no address: the path of a unix socket has at most {MAX_SUN_PATH} bytes")
        return Address("unix", path=rest)
    if found and scheme == "memory":
        if not _MEMORY_NAME.match(rest):
            raise ValueError(f"{text!r} is no address: a name is missing, as in memory://a, or has odd characters")
        return Address("memory", path=rest)
    raise ValueError(f"{text!r} is no address: it must begin with tcp://, unix:// or memory://")


def _parse_tcp(text: str, rest: str) -> Address:
    host, colon, port = rest.rpartition(":")
    if not colon or not _PORT.match(port) or int(port) > 0xFFFF:
        raise ValueError(f"{text!r} is no address: it must end with a port, ':' and a number from 0 to 65535")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
        try:
            ipaddress.IPv6Address(host)
        except ValueError as error:
            raise ValueError(f"{text!r} is no address: what stands in brackets is not IPv6 ({error})") from error
    elif ":" in host:
        raise ValueError(f"{text!r} is no address: IPv6 stands in brackets, as in tcp://[::1]:1234")
    elif not _HOST_NAME.match(host):
        raise ValueError(f"{text!r} is no address: {host!r} is not a host's name or IP address")
    return Address("tcp", host=host, port=int(port))


def host_identity(runtime_dir: Path) -> str:
    """Return a text that two processes share only if they can reach each other's sockets in `runtime_dir`.

    Containers on one machine share the boot id but not the file system, and bind mounts may show one directory at
    two paths: hence the directory itself (device, inode) and its path are part of the identity, next to boot and user.
    """
    try:
        machine = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        machine = f"{socket.gethostname()} {os.getuid()}"
    directory = runtime_dir.resolve(strict=True)
    status = directory.stat()
    parts = (machine, str(os.geteuid()), str(status.st_dev), str(status.st_ino), str(directory))
    return hashlib.blake2b("\0".join(parts).encode("utf-8", "surrogateescape"), digest_size=12).hexdigest()


def route_address(host: str, port: int) -> str:
    """Return this machine's own IP address on the way to `host`. Nothing is sent.

    A host whose name means loopback here (Debian maps a machine's own name so) gives a loopback address; where
    other machines take part, an interface or an advertised address has to be set.
    """
    problem = "its name has no address"
    try:
        # A port is needed to connect a UDP socket, and any will do: connecting one only asks the kernel for a route.
        candidates = socket.getaddrinfo(host, port or 9, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError) as error:
        raise TelegradError(f"cannot find a route to {host!r}: {error}; {_WHAT_TO_SET}") from error
    for family, kind, protocol, _, target in candidates:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(target)
                return str(probe.getsockname()[0])
        except OSError as error:
            problem = str(error)
    raise TelegradError(f"cannot find a route to {host!r}: {problem}; {_WHAT_TO_SET}")


def interface_address(name: str) -> str:
    """Return the IP address of a network interface: IPv4 if it has one, else the widest IPv6."""
    existing = [interface for _, interface in socket.if_nameindex()]
    if name not in existing:
        raise TelegradError(f"there is no network interface {name!r} on this machine; there are {', '.join(existing)}")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            reply = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", os.fsencode(name)))
            return socket.inet_ntoa(reply[20:24])
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise
    address = _ipv6_address(name)
    if address is None:
        raise TelegradError(
            f"the network interface {name!r} has no IP address; the interfaces here are {', '.join(existing)}"
        )
    return address


def _ipv6_address(interface: str) -> str | None:
    try:
        lines = Path("/proc/net/if_inet6").read_text().splitlines()
    except FileNotFoundError:
        return None  # a kernel without IPv6
    by_scope = []
    for line in lines:
        digits, _, _, scope, _, name = line.split()
        if name == interface:
            by_scope.append((int(scope, 16), str(ipaddress.IPv6Address(bytes.fromhex(digits)))))
    if not by_scope:
        return None
    # The kernel's scopes: 0 is global, 0x10 the host, 0x20 the link, where an address means nothing without its link.
    scope_number, address = min(by_scope)
    return f"{address}%{interface}" if scope_number == 0x20 else address


def choose_addresses(
    *,
    rendezvous_host: str | None,
    rendezvous_port: int | None,
    bind: str | None = None,
    advertise: str | None = None,
    interface: str | None = None,
    environ: Mapping[str, str] = os.environ,
) -> tuple[str, str]:
    """Return the host to listen on and the host to tell others.

    What is explicit beats an interface, and that beats the route to the rendezvous. Without any of them (a rendezvous
    over a file) it is loopback.
    """
    if advertise is not None and _is_wildcard(advertise):
        raise TelegradError(f"nobody can connect to {advertise!r}: advertise an address of this machine, or none")
    if advertise is None:
        if bind is not None and not _is_wildcard(bind):
            advertise = bind
        else:
            advertise = _interface_or_route(rendezvous_host, rendezvous_port, interface, environ)
    return (advertise if bind is None else bind), advertise


def _is_wildcard(host: str) -> bool:
    return host in ("", "*", "0.0.0.0", "::")


def _interface_or_route(host: str | None, port: int | None, interface: str | None, environ: Mapping[str, str]) -> str:
    if interface is not None:
        return _first_interface(interface, "the argument")
    for variable in INTERFACE_VARIABLES:
        if environ.get(variable):
            return _first_interface(environ[variable], variable)
    return _LOOPBACK if host is None else route_address(host, port or 0)


def _first_interface(names: str, source: str) -> str:
    existing = [name for _, name in socket.if_nameindex()]
    for name in names.split(","):
        if name.strip() in existing:
            return interface_address(name.strip())
    raise TelegradError(
        f"no network interface of this machine is named in {source}: {names!r}; there are {', '.join(existing)}"
    )


def runtime_directory(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the directory for this user's unix sockets, made if need be, and safe from other users.

    ``TELEGRAD_RUNTIME_DIR``, else ``telegrad`` in ``XDG_RUNTIME_DIR`` where that is ours, else a directory of this
    user's own where temporary files go.
    """
    if environ.get("TELEGRAD_RUNTIME_DIR"):
        directory = Path(environ["TELEGRAD_RUNTIME_DIR"])
    elif environ.get("XDG_RUNTIME_DIR") and _is_ours(environ["XDG_RUNTIME_DIR"]):
        directory = Path(environ["XDG_RUNTIME_DIR"], "telegrad")
    else:
        directory = Path(tempfile.gettempdir(), f"telegrad-{os.geteuid()}")
    directory = directory.absolute()
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Not followed if it is a link: in a directory for everybody, somebody else may have put it there.
        status = directory.lstat()
    except OSError as error:
        raise TelegradError(
            f"cannot make the directory {directory} for unix sockets: {error.strerror}; set TELEGRAD_RUNTIME_DIR"
        ) from error
    if not stat.S_ISDIR(status.st_mode):
        raise TelegradError(f"{directory} must be a directory, and is something else; set TELEGRAD_RUNTIME_DIR")
    if status.st_uid != os.geteuid():
        raise TelegradError(
            f"the directory {directory} belongs to user id {status.st_uid}, and this process runs as {os.geteuid()}; "
            "set TELEGRAD_RUNTIME_DIR to a directory of your own"
        )
    if status.st_mode & 0o022:
        raise TelegradError(
            f"other users may write into {directory} (mode {stat.S_IMODE(status.st_mode):04o}); "
            f"run `chmod 700 {shlex.quote(str(directory))}`, or set TELEGRAD_RUNTIME_DIR"
        )
    return directory


def _is_ours(directory: str) -> bool:
    try:
        status = os.stat(directory)
    except OSError:
        return False  # named by the environment but not there, as after su: the next choice is as good
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and os.access(directory, os.W_OK | os.X_OK)


def socket_path(directory: Path, name: str, incarnation: int) -> Path:
    """Return where worker `name` puts its socket: readable as far as there is room, another for each incarnation."""
    digest = hashlib.blake2b(f"{name}\0{incarnation}".encode(), digest_size=8).hexdigest()
    room = MAX_SUN_PATH - len(os.fsencode(directory)) - len(f"/{digest}.sock")
    if room < 0:
        raise TelegradError(
            f"the directory {directory} has too long a path for a unix socket ({MAX_SUN_PATH} bytes in all); "
            "set TELEGRAD_RUNTIME_DIR to a shorter one"
        )
    stem = re.sub(r"[^0-9A-Za-z_-]", "-", name)[: min(room - 1, 32)] if room > 1 else ""
    return directory / (f"{stem}-{digest}.sock" if stem else f"{digest}.sock")


def sweep_dead_sockets(directory: Path) -> list[Path]:
    """Remove the sockets that killed workers left in `directory`, and return them.

    A socket is bound under a temporary name without ``.sock``, put to listen, and only then renamed. So there is no
    moment at which a living worker's ``.sock`` refuses a connection, and one that refuses is dead for sure; nor is
    its name used again, being made from the incarnation. A living worker sees a connection that closes at once.
    """
    removed = []
    for path in sorted(directory.glob("*.sock")):
        if _is_dead_socket(path):
            try:
                path.unlink()
            except FileNotFoundError:
                continue  # another worker sweeps at the same time
            removed.append(path)
    return removed


def _is_dead_socket(path: Path) -> bool:
    try:
        status = path.lstat()
        if not stat.S_ISSOCK(status.st_mode) or status.st_uid != os.geteuid():
            return False
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            # Where the backlog is full the worker is busy, not dead, and must not hold us up.
            probe.setblocking(False)
            probe.connect(str(path))
    except OSError as error:
        return error.errno == errno.ECONNREFUSED
    return False
