"""An in-memory transport, for agents in one process.

A `MemoryNetwork` connects them. It delivers at once; the simulation overrides `deliver` to delay, lose and duplicate
frames, and to break connections.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterator

from telegrad.transport.base import Link, LinkClosed, Listener, Poller, Readiness, Ready, Transport
from telegrad.waiting import Event, RealRuntime, Runtime
from telegrad.wire.frames import BULK_CHUNK, HANDSHAKE_LIMITS, Frame, Kind, Limits


class MemoryNetwork:
    """The listeners by address, and the delivery of frames."""

    def __init__(self, runtime: Runtime | None = None) -> None:
        self.runtime = runtime or RealRuntime()
        self.lock = threading.RLock()  # protects all links, listeners and pollers of this network
        self.listeners: dict[str, MemoryListener] = {}
        self._names = itertools.count(1)

    def deliver(self, link: MemoryLink, frame: Frame) -> None:
        """Deliver `frame`, which was sent on `link`, to the other end. Called with the lock held."""
        link.other.arrived(frame)

    def connecting(self, source: str, target: str) -> None:
        """Raise an OSError if `source` cannot connect to `target` now."""

    def connected(self, link: MemoryLink) -> None:
        """Record a new connection. Called with the lock held."""

    def hang_up(self, link: MemoryLink, reason: str) -> None:
        """Notify the other end of `link` that it was closed. Called with the lock held."""
        link.other.ended(reason)

    def unsent(self, link: MemoryLink) -> bool:
        """Return whether frames of `link` wait because the network takes no more. Called with the lock held."""
        return False

    def fresh_name(self) -> str:
        return f"memory://{next(self._names)}"


class MemoryTransport(Transport):
    """Addresses are ``memory://name`` inside one network; an empty name picks a free one."""

    scheme = "memory"

    def __init__(self, network: MemoryNetwork, *, resumable: bool = True, origin: str = "") -> None:
        self._network = network
        self._origin = origin
        self.resumable = resumable

    def poller(self) -> Poller:
        """Return a poller for the links of this network."""
        return MemoryPoller(self._network)

    def listen(self, address: str) -> Listener:
        network = self._network
        with network.lock:
            if address == "memory://":
                address = network.fresh_name()
            if address in network.listeners:
                raise OSError(f"address {address} is already in use")
            network.listeners[address] = listener = MemoryListener(network, address)
            return listener

    def connect(self, address: str, deadline: float) -> Link:
        network = self._network
        with network.lock:
            network.connecting(self._origin, address)
            listener = network.listeners.get(address)
            if listener is None:
                raise ConnectionRefusedError(f"nobody listens at {address}")
            here = MemoryLink(network, self._origin, address, self.resumable)
            there = MemoryLink(network, address, self._origin, self.resumable)
            here.other, there.other = there, here
            network.connected(here)
            listener.pending.append(there)
            listener.changed()
            return here


class _Pollable:
    """A link or listener that a poller or a waiting thread can watch."""

    def __init__(self, network: MemoryNetwork) -> None:
        self.network = network
        self.poller: MemoryPoller | None = None
        self.armed = False
        self.waiting: Event | None = None

    def changed(self) -> None:
        if self.waiting is not None:
            self.waiting.set()
        if self.poller is not None:
            self.poller.changed()

    def readable(self) -> bool:
        raise NotImplementedError


class MemoryLink(_Pollable, Link):
    """One end of a connection."""

    other: MemoryLink

    def __init__(self, network: MemoryNetwork, origin: str, target: str, resumable: bool) -> None:
        super().__init__(network)
        self.origin = origin
        self.target = target
        self.peer = target or "an agent of this process"
        self.resumable = resumable
        self._inbox: deque[Frame] = deque()
        self._end = ""
        self._woken = False
        self._limits = HANDSHAKE_LIMITS
        self._only_handshake = True

    def admit(self, limits: Limits, place: Callable[[int, int], memoryview | None]) -> None:
        self._limits, self._only_handshake = limits, False

    def send(
        self, kind: int, body: bytes | bytearray | memoryview, sequence: int, ack_control: int, ack_bulk: int
    ) -> None:
        with self.network.lock:
            if not self._end:
                # A copy, because the receiver's tensors use it, and must not share memory with the sender. Chunks are
                # copied when they are received, as late as by a slow socket: they may refer to the sender's tensors.
                sent = body if kind == BULK_CHUNK else bytearray(body)
                self.network.deliver(self, Frame(kind, sequence, ack_control, ack_bulk, sent))

    def arrived(self, frame: Frame) -> None:
        """Receive a frame from the network. Called with the lock held."""
        if not self._end:
            self._inbox.append(frame)
            self.changed()

    def ended(self, reason: str) -> None:
        """End the connection at this side. Called with the lock held."""
        if not self._end:
            self._end = reason
            self.changed()

    def receive(self) -> Iterator[Frame]:
        while True:
            with self.network.lock:
                if not self._inbox:
                    if self._end:
                        raise LinkClosed(self._end)
                    return
                frame = self._inbox.popleft()
            if len(frame.body) > self._limits.frame or (self._only_handshake and frame.kind != Kind.HANDSHAKE):
                raise LinkClosed(f"a frame of kind {frame.kind} and {len(frame.body)} bytes is not allowed yet")
            yield frame if frame.kind != BULK_CHUNK else frame._replace(body=bytes(frame.body))

    def readable(self) -> bool:
        return bool(self._inbox or self._end)

    def over(self) -> bool:
        """Return whether the connection has ended."""
        return bool(self._end)

    def flush(self) -> None:
        """Do nothing: the network queues frames, if anything does."""

    def unsent(self) -> bool:
        with self.network.lock:
            return self.network.unsent(self)

    def wait(self, deadline: float | None, poller: Poller | None = None) -> int:
        assert poller is None or isinstance(poller, MemoryPoller)
        event = self.network.runtime.event()
        with self.network.lock:
            if not (self.readable() or self._woken or (poller is not None and poller.is_ready())):
                self.waiting = event
                if poller is not None:
                    poller.watcher = event
            else:
                event.set()
        event.wait(deadline)
        with self.network.lock:
            self.waiting = None
            ready: int = Ready.READ if self.readable() else Ready.NOTHING
            if poller is not None:
                poller.watcher = None
                if poller.is_ready():
                    ready |= Ready.POLLER
            self._woken = False
        return ready

    def wake(self) -> None:
        with self.network.lock:
            self._woken = True
            self.changed()

    def close(self) -> None:
        with self.network.lock:
            if not self._end:
                self._end = "closed by this worker"
                self.network.hang_up(self, "end of file")
                self._inbox.clear()
            self.changed()
            if self.poller is not None:
                self.poller.remove(self)

    def abandon(self) -> None:
        """Do nothing: there is no handle that a fork would share."""


class MemoryListener(_Pollable, Listener):
    """An address that accepts connections from agents of this process."""

    def __init__(self, network: MemoryNetwork, address: str) -> None:
        super().__init__(network)
        self.address = address
        self.pending: deque[MemoryLink] = deque()

    def readable(self) -> bool:
        return bool(self.pending)

    def accept(self) -> Link | None:
        with self.network.lock:
            return self.pending.popleft() if self.pending else None

    def close(self) -> None:
        with self.network.lock:
            if self.network.listeners.get(self.address) is self:
                del self.network.listeners[self.address]
            while self.pending:
                self.pending.popleft().close()

    def abandon(self) -> None:
        """Do nothing: there is no handle that a fork would share."""


class MemoryPoller(Poller):
    """Watches links and listeners of one network."""

    def __init__(self, network: MemoryNetwork) -> None:
        self._network = network
        self._items: dict[_Pollable, bool] = {}  # item -> whether to report it once
        self._done: set[_Pollable] = set()  # reported once, and not armed again
        self._woken = False
        self.watcher: Event | None = None
        self._waiting: Event | None = None

    def add(self, item: Link | Listener, *, read: bool, once: bool = False) -> None:
        assert isinstance(item, _Pollable)
        with self._network.lock:
            self._items[item] = once
            self._done.discard(item)
            item.poller, item.armed = self, read
            self.changed()

    def arm(self, item: Link | Listener, *, read: bool) -> None:
        assert isinstance(item, _Pollable)
        with self._network.lock:
            item.armed = read
            self._done.discard(item)
            self.changed()

    def remove(self, item: Link | Listener) -> None:
        assert isinstance(item, _Pollable)
        with self._network.lock:
            self._items.pop(item, None)
            self._done.discard(item)
            item.poller = None

    def changed(self) -> None:
        """Wake the waiting threads if something is ready. Called with the lock held."""
        if self.watcher is not None and self.is_ready():
            self.watcher.set()
        if self._waiting is not None and self.is_ready():
            self._waiting.set()

    def is_ready(self) -> bool:
        """Return whether `wait` would return at once. Called with the lock held."""
        return self._woken or any(item.readable() and self._is_ready(item) for item in self._items)

    def _is_ready(self, item: _Pollable) -> bool:
        if not item.readable() or item in self._done:
            return False
        return item.armed or (isinstance(item, MemoryLink) and item.over())

    def wait(self, deadline: float | None) -> list[Readiness]:
        event = self._network.runtime.event()
        with self._network.lock:
            if self.is_ready():
                event.set()
            self._waiting = event
        event.wait(deadline)
        with self._network.lock:
            self._waiting = None
            self._woken = False
            found = []
            for item, once in self._items.items():
                if self._is_ready(item):
                    assert isinstance(item, MemoryLink | MemoryListener)
                    found.append(Readiness(item, Ready.READ))
                    if once:
                        self._done.add(item)
            return found

    def wake(self) -> None:
        with self._network.lock:
            self._woken = True
            self.changed()

    def close(self) -> None:
        with self._network.lock:
            self._items.clear()

    def abandon(self) -> None:
        """Do nothing: there is no handle that a fork would share."""
