"""TCP, between hosts. A connection may break while both workers are alive; the session resumes on the next one.

`TlsTransport` encrypts it. Workers use plain TCP only if their user has switched TLS off.
"""

from __future__ import annotations

import errno
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from telegrad.transport.addresses import parse_address
from telegrad.transport.base import Link, Listener, Transport
from telegrad.transport.ports import BACKLOG, bind_in_range, make_socket
from telegrad.transport.socket_link import SocketLink, connect, reset
from telegrad.transport.sockets import SocketListener
from telegrad.wire.frames import HEADER_SIZE, MAGIC

_LONG_BACKLOG = 128
_LOOK_EVERY = 32
_FEW, _ONE_IN = 64, 8  # of a host that keeps the backlog long: accept the first few connections, then one in so many
_MOST_HOSTS = 1024
_MOST_FIRST_BYTES = 64  # a frame header, a preamble and a relay header are shorter
_BACKLOG_END = 28  # the end of tcp_info.tcpi_unacked, which is the length of the backlog for a listening socket

Connected = TypeVar("Connected")


class TcpTransport(Transport):
    """Addresses are ``tcp://host:port`` and ``tcp://[ipv6]:port``; port 0 picks a free one.

    If `deferred`, a listener only reserves its port, and refuses connections until it is opened. If there are `ports`,
    port 0 picks one of them.
    """

    scheme = "tcp"
    resumable = True

    def __init__(
        self, *, advertise: str | Mapping[str, str] = "", deferred: bool = False, ports: Sequence[int] = ()
    ) -> None:
        """`advertise` is the host to announce, or one for each host to listen on."""
        self._advertise = advertise
        self._deferred = deferred
        self._ports = ports
        hosts = [advertise] if isinstance(advertise, str) else list(advertise)
        self._only_ipv6 = len(hosts) > 1  # a socket for all IPv6 addresses does not take IPv4 connections, too
        self._scope = "".join(host.rpartition("%")[2] for host in hosts if "%" in host)

    def listen(self, address: str) -> Listener:
        host, port = _host_and_port(address)
        family, kind, protocol, _, where = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listens = False
        if self._ports and not port:
            sock, listens = bind_in_range((family, kind, protocol), where, self._ports, only_ipv6=self._only_ipv6)
        else:
            sock = make_socket((family, kind, protocol), only_ipv6=self._only_ipv6)
        try:
            if port:  # otherwise the kernel could choose a port that another socket has only reserved
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if port or not self._ports:
                sock.bind(where)
            advertise = self._advertise if isinstance(self._advertise, str) else self._advertise.get(host, "")
            announced = format_tcp(advertise or host, sock.getsockname()[1])
            listener = self._make_listener(sock, announced)
            if listens or not self._deferred:
                listener.open()
        except BaseException:
            sock.close()
            raise
        return listener

    def connect(self, address: str, deadline: float) -> Link:
        return self._connect(address, deadline, self._open_link)

    def open_socket(self, address: str, deadline: float) -> socket.socket:
        """Return a socket that is connected to `address`. Raises what `connect` raises."""
        return self._connect(address, deadline, _itself)

    def _connect(
        self, address: str, deadline: float, use: Callable[[socket.socket, str, str, float], Connected]
    ) -> Connected:
        """Connect, and return what `use` makes of the socket."""
        self._prepare()
        host, port = self._destination(address)
        host = with_own_scope(host, self._scope)
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
                return use(sock, address, f"{host}:{port}", deadline)
            except OSError as error:
                sock.close()
                failure = error
            except BaseException:
                sock.close()
                raise
        raise failure

    def _prepare(self) -> None:
        """Called before a listener opens and before connecting, so that no peer has to wait for it."""

    def _make_listener(self, sock: socket.socket, address: str) -> TcpListener:
        return TcpListener(sock, address, self._prepare, _plain_link, _starts_a_frame)

    def _destination(self, address: str) -> tuple[str, int]:
        return _host_and_port(address)

    def _open_link(self, sock: socket.socket, address: str, peer: str, deadline: float) -> Link:
        """Return the link of a socket that is connected to the worker at `address`."""
        return _plain_link(sock, peer)


class TcpListener(SocketListener):
    """A listening TCP socket. While its backlog is long, connections that have sent nothing are dropped.

    The peer of a connection sends its first message as soon as it is connected. A connection at the head of a long
    backlog had time for that. Dropping it here takes a third of the time of accepting and evicting it. So do those that
    begin as no member does: with TLS, without a valid preamble. Most of those from an address that keeps the backlog
    long with valid beginnings are dropped, too: each would cost a handshake. A member at that address gets in with one
    of its next attempts, and others at once.
    """

    def __init__(
        self,
        sock: socket.socket,
        address: str,
        prepare: Callable[[], None],
        make_link: Callable[[socket.socket, str], Link],
        is_valid_beginning: Callable[[bytes], bool],
    ) -> None:
        super().__init__(sock, address, self._accepted)
        self._prepare = prepare
        self._link_of = make_link
        self._is_valid_beginning = is_valid_beginning  # whether a member may send these bytes first
        self._begun: Counter[str] = Counter()  # by host: connections that begin like that, while the backlog is long
        self._until_look = 0  # connections to accept before the length of the backlog is looked at again
        self._hurries = False
        self._dropped: dict[str, int] = {}
        self.is_open = False

    def open(self) -> None:
        if not self.is_open:
            self._prepare()
            # For connections that outlive the listener: they must not keep others from its port.
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._socket.listen(BACKLOG)
            self.is_open = True

    def _accepted(self, sock: socket.socket) -> Link | None:
        try:
            host, port = sock.getpeername()[:2]
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except OSError:  # it was closed meanwhile
            host, port = "an address that is gone", 0
        if self._until_look == 0:
            self._until_look = _LOOK_EVERY
            self._hurries = _backlog(self._socket) > _LONG_BACKLOG
            if not self._hurries or len(self._begun) > _MOST_HOSTS:
                self._begun.clear()
        self._until_look -= 1
        if not port or (self._hurries and not self._is_worth_a_handshake(sock, host)):
            self._dropped[host] = self._dropped.get(host, 0) + 1
            reset(sock)
            return None
        return self._link_of(sock, f"{host}:{port}")

    def _is_worth_a_handshake(self, sock: socket.socket, host: str) -> bool:
        """Return whether a connection from a long backlog should be accepted."""
        if not self._is_valid_beginning(_first_bytes(sock)):
            return False
        self._begun[host] += 1
        return self._begun[host] <= _FEW or self._begun[host] % _ONE_IN == 0

    def take_dropped(self) -> Mapping[str, int]:
        dropped, self._dropped = self._dropped, {}
        return dropped


def _itself(sock: socket.socket, address: str, peer: str, deadline: float) -> socket.socket:
    return sock


def _plain_link(sock: socket.socket, peer: str) -> Link:
    return SocketLink(sock, peer=peer, resumable=True)


def _starts_a_frame(first: bytes) -> bool:
    return first.startswith(MAGIC) and len(first) >= HEADER_SIZE


def _backlog(listener: socket.socket) -> int:
    """Return how many connections wait to be accepted; 0 if the system does not tell."""
    try:
        info = listener.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BACKLOG_END)
    except (AttributeError, OSError):
        return 0
    return int.from_bytes(info[_BACKLOG_END - 4 : _BACKLOG_END], sys.byteorder)


def _first_bytes(sock: socket.socket) -> bytes:
    """Return the first bytes, if some have arrived."""
    try:
        return sock.recv(_MOST_FIRST_BYTES, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except OSError:
        return b""


def with_own_scope(host: str, scope: str) -> str:
    """Return the IPv6 address of a link, which another machine announces, with an interface of this machine.

    The interface in the announcement is the other machine's. Here it is `scope`; if that is empty, the one of the same
    name, or else the first.
    """
    address, percent, announced = host.partition("%")
    if not percent:
        return host
    own = [name for _, name in socket.if_nameindex() if name != "lo"]
    if not scope:
        scope = announced if announced in own or not own else own[0]
    return f"{address}%{scope}"


def format_tcp(host: str, port: int) -> str:
    """Return the address of a host and port, with brackets around IPv6."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def _host_and_port(address: str) -> tuple[str, int]:
    parsed = parse_address(address)
    return parsed.host, parsed.port
