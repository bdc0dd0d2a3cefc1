"""The interface of a transport, which moves frames and only blocks in `connect`, `Link.wait` and `Poller.wait`.

`telegrad.testing.check_transport` tests what these docstrings specify; every transport passes it.
"""

from __future__ import annotations

import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, NamedTuple

from telegrad.wire.frames import Frame, Limits
from telegrad.wire.relay_header import RelayHeader


class LinkClosed(ConnectionError):
    """The connection is closed. The text says why, as far as this side knows."""


class RelayedConnection(Exception):
    """A member has opened this connection for another one: it is no link, and whoever reads it takes the socket."""

    def __init__(self, header: RelayHeader, release: Callable[[], socket.socket]) -> None:
        super().__init__(f"a relayed connection with the ticket {header.ticket.hex()}")
        self.header = header
        self.release = release
        """Closes the link without the socket, and returns it."""


class Ready:
    """Why a wait ended: the sum of these. NOTHING: the deadline passed, or `wake` was called.

    Plain integers, because each ``&`` of an `IntFlag` takes half a microsecond, several times per call.
    """

    NOTHING: Final = 0
    READ: Final = 1
    WRITE: Final = 2
    POLLER: Final = 4


class Link(ABC):
    """One connection. One thread at a time reads from it; any thread may send."""

    resumable: bool
    """Whether the connection can break, and lose frames, while the peer is alive."""
    peer: str
    """A description of the other end, for logs and errors."""
    owner: Any = None
    """The object to notify when the poller reports this link."""
    shares_memory: bool = False
    """Whether both ends are on one host, so that `offer` and `take_fd` work."""
    binding: bytes = b""
    """The SHA-256 of the listener's certificate, as this side sees it; empty if the connection is not encrypted.

    It is part of every proof of the handshake, so nobody can relay a handshake over two connections.
    """
    has_preamble: bool = False
    """Whether the opener has begun with a valid preamble: it is a member, most likely, but not authenticated yet."""
    peer_names: tuple[str, ...] | None = None
    """The DNS names in the verified certificate of the other end; None if no certificate was verified."""

    @abstractmethod
    def admit(self, limits: Limits, place: Callable[[int, int], memoryview | None]) -> None:
        """Accept frames of every kind, up to `limits`, after the peer has authenticated.

        `place` returns the memory for a chunk of bulk data, by its sequence number and size.
        """

    @abstractmethod
    def send(
        self, kind: int, body: bytes | bytearray | memoryview, sequence: int, ack_control: int, ack_bulk: int
    ) -> None:
        """Send a frame now, or queue it in the order of its lane until there is room. Never blocks, and never raises:
        if the link is closed, `receive` raises."""

    def offer(self, body: bytes, fd: int) -> bool:
        """Send a SLAB_OFFER together with a file descriptor, which the caller closes afterwards. Return False if that
        is impossible now, because frames are queued, or at all."""
        return False

    def take_fd(self) -> int | None:
        """Return the file descriptor that came with the last OFFER. The caller closes it."""
        return None

    @abstractmethod
    def receive(self) -> Iterable[Frame]:
        """Return the frames that have arrived. Never blocks. Raises LinkClosed after the last frame."""

    @abstractmethod
    def flush(self) -> None:
        """Send queued frames, as far as there is room."""

    @abstractmethod
    def unsent(self) -> bool:
        """Return whether frames are queued until there is room."""

    def unsent_bytes(self) -> int:
        """Return how many bytes are queued, as far as the link counts them. Those of a resumable session are counted
        there."""
        return 0

    @abstractmethod
    def wait(self, deadline: float | None, poller: Poller | None = None) -> int:
        """Wait until there is something to read (or the link is closed), `wake` is called, or the poller, if given, has
        something to report. Queued frames are sent meanwhile."""

    @abstractmethod
    def wake(self) -> None:
        """End the current or the next `wait`."""

    @abstractmethod
    def close(self) -> None:
        """Close. Frames that were sent before still arrive, as far as the connection has room for them."""

    def abort(self) -> None:
        """Close, and keep nothing for the peer: what it has not received is lost."""
        self.close()

    @abstractmethod
    def abandon(self) -> None:
        """Close only this process's handle, in a forked child."""


class Listener(ABC):
    """An address that accepts connections."""

    address: str
    owner: Any = None
    """The object to notify when the poller reports a connection."""
    is_open: bool = True
    """Whether it accepts connections. Otherwise they are refused, and it must not be polled, until `open`."""

    def open(self) -> None:  # noqa: B027 - most listeners accept connections from the start
        """Accept connections from now on."""

    @abstractmethod
    def accept(self) -> Link | None:
        """Return the next connection, or None if none is pending. Never blocks. An OSError means that this process
        cannot accept it now (it is out of file descriptors), and that it stays pending.

        While very many are pending, it may drop some that have sent nothing, and return None before all are accepted.
        """

    def take_dropped(self) -> Mapping[str, int]:
        """Return how many connections `accept` has dropped since the last call, by their source address."""
        return _NONE_DROPPED

    @abstractmethod
    def close(self) -> None:
        """Stop listening, and remove the socket file, if there is one."""

    @abstractmethod
    def abandon(self) -> None:
        """Close only this process's handle, in a forked child."""


_NONE_DROPPED: Mapping[str, int] = {}


class Readiness(NamedTuple):
    """A link or listener that is ready."""

    item: Link | Listener
    ready: int
    """See `Ready`."""


class Poller(ABC):
    """Waits for many links and listeners at once. One thread at a time calls `wait`; any thread calls the rest."""

    @abstractmethod
    def add(self, item: Link | Listener, *, read: bool, once: bool = False) -> None:
        """Watch `item`: always for its end, and for something to read if `read`. With `once`, it is reported once and
        then not again until `arm`. An item that is added again is watched as the last call says."""

    @abstractmethod
    def arm(self, item: Link | Listener, *, read: bool) -> None:
        """Set whether something to read is reported."""

    @abstractmethod
    def remove(self, item: Link | Listener) -> None:
        """Stop watching `item`."""

    @abstractmethod
    def wait(self, deadline: float | None) -> list[Readiness]:
        """Return what is ready: nothing at the deadline or after `wake`."""

    @abstractmethod
    def wake(self) -> None:
        """End the current or the next `wait`."""

    @abstractmethod
    def close(self) -> None:
        """Free its resources."""

    @abstractmethod
    def abandon(self) -> None:
        """Close only this process's handle, in a forked child."""


class Transport(ABC):
    """One kind of connection between workers."""

    scheme: str
    resumable: bool
    encrypted: bool = False

    @abstractmethod
    def listen(self, address: str) -> Listener:
        """Listen at `address`. A missing port or name is chosen; see the listener's address."""

    @abstractmethod
    def connect(self, address: str, deadline: float) -> Link:
        """Connect. Raises ConnectionRefusedError (nobody listens there), TimeoutError or another OSError."""

    def reaches(self, address: str) -> bool:
        """Return whether a worker at `address` can be reached from here, as far as that is known without connecting.

        Two workers may believe that they are on one host and not see each other's sockets, in containers for example.
        """
        return True

    def remove_dead(self, address: str) -> bool:
        """Remove what a killed process left at `address`. Return False if somebody still listens there."""
        return True
