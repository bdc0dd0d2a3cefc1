"""What a transport is: it moves frames, and never waits except in `connect`, `Link.wait` and `Poller.wait`.

`telegrad.testing.check_transport` tests all that the docstrings here promise; every transport passes it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any, Final, NamedTuple

from telegrad.wire.frames import Frame, Limits


class LinkClosed(ConnectionError):
    """The connection is gone. The text says why, as far as this side can know."""


class Ready:
    """Why a wait ended: the sum of these. Nothing: the deadline passed, or somebody called `wake`.

    Plain numbers: an `IntFlag` takes half a microsecond for each ``&``, several times in every call.
    """

    NOTHING: Final = 0
    READ: Final = 1
    WRITE: Final = 2
    POLLER: Final = 4


class Link(ABC):
    """One connection. One thread at a time reads from it; any thread may send."""

    resumable: bool
    """Whether frames may be lost when it breaks although the peer lives."""
    peer: str
    """The other end, for people."""
    owner: Any = None
    """Whoever is to be told when the poller finds it ready."""
    shares_memory: bool = False
    """Whether `offer` and `take_fd` work: both ends are on one host."""

    @abstractmethod
    def admit(self, limits: Limits, place: Callable[[int, int], memoryview | None]) -> None:
        """The peer has proved itself: frames of every kind may come now, as large as `limits` says."""

    @abstractmethod
    def send(
        self, kind: int, body: bytes | bytearray | memoryview, sequence: int, ack_control: int, ack_bulk: int
    ) -> None:
        """Take a frame, in order within its lane, and send it now or when there is room. Never waits, never raises:
        if the link is closed, reading says so."""

    def offer(self, body: bytes, fd: int) -> bool:
        """Send a SLAB_OFFER together with a file descriptor, which stays the caller's to close. False: not now, because
        others wait to be sent, or not at all."""
        return False

    def take_fd(self) -> int | None:
        """The file descriptor that came with the SLAB_OFFER received last; the caller closes it."""
        return None

    @abstractmethod
    def receive(self) -> Iterable[Frame]:
        """The frames that are there. Never waits; raises LinkClosed after the last one that came."""

    @abstractmethod
    def flush(self) -> None:
        """Go on with what `send` could not send at once."""

    @abstractmethod
    def unsent(self) -> bool:
        """Whether something that was sent waits for room in the connection."""

    @abstractmethod
    def wait(self, deadline: float | None, poller: Poller | None = None) -> int:
        """Wait until there is something to read (or the link is closed), `wake` is called, or the poller, if one is
        given, has something to report. What is queued is sent meanwhile."""

    @abstractmethod
    def wake(self) -> None:
        """End the current or the next `wait`."""

    @abstractmethod
    def close(self) -> None:
        """Close; what was sent before and fits into the connection still arrives."""

    @abstractmethod
    def abandon(self) -> None:
        """Close this process's handle and nothing else: for the child of a fork."""


class Listener(ABC):
    """Where others connect to."""

    address: str
    owner: Any = None
    """Whoever is to be told when the poller finds somebody there."""

    @abstractmethod
    def accept(self) -> Link | None:
        """The next connection, or None if nobody waits. Never waits; an OSError means that this process cannot take it
        now (it has no file descriptor left), and that it still waits."""

    @abstractmethod
    def close(self) -> None:
        """Stop listening, and remove what belongs to the address."""

    @abstractmethod
    def abandon(self) -> None:
        """Close this process's handle and nothing else: for the child of a fork."""


class Readiness(NamedTuple):
    """One thing that a poller found ready."""

    item: Link | Listener
    ready: int
    """See `Ready`."""


class Poller(ABC):
    """Waits for many links and listeners at once. One thread at a time calls `wait`; any thread the rest."""

    @abstractmethod
    def add(self, item: Link | Listener, *, read: bool, once: bool = False) -> None:
        """Watch `item`: for its end always, for something to read if `read`. With `once`, what was reported is not
        reported again until `arm`."""

    @abstractmethod
    def arm(self, item: Link | Listener, *, read: bool) -> None:
        """Change whether something to read is reported."""

    @abstractmethod
    def remove(self, item: Link | Listener) -> None:
        """Watch it no longer."""

    @abstractmethod
    def wait(self, deadline: float | None) -> list[Readiness]:
        """What is ready; nothing at the deadline or after `wake`."""

    @abstractmethod
    def wake(self) -> None:
        """End the current or the next `wait`."""

    @abstractmethod
    def close(self) -> None:
        """Free what it holds."""

    @abstractmethod
    def abandon(self) -> None:
        """Close this process's handle and nothing else: for the child of a fork."""


class Transport(ABC):
    """One way to reach others."""

    scheme: str
    resumable: bool

    @abstractmethod
    def listen(self, address: str) -> Listener:
        """Listen at `address`, whose port or name may be left open; the listener's address says what it became."""

    @abstractmethod
    def connect(self, address: str, deadline: float) -> Link:
        """Connect, or raise ConnectionRefusedError (nobody listens there), TimeoutError or another OSError."""

    def remove_dead(self, address: str) -> bool:
        """Remove what a killed process left at `address`; False if somebody listens there still."""
        return True
