"""What every check of a transport uses: connected links, bounded reads and polls, and background threads.

Nothing here waits forever: whatever takes longer than `PATIENCE` breaks the contract.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Generic, TypeVar

from telegrad.errors import ProtocolError
from telegrad.testing.contract import BrokenPromise
from telegrad.transport.base import Link, LinkClosed, Listener, Poller, Ready, Transport
from telegrad.wire.frames import BULK_CHUNK, CHUNK, Frame, Kind, Limits, lane_of

PATIENCE = 20.0
"""Seconds for operations that should be instant: test machines are busy."""
SHORT = 0.03
"""Seconds to wait where a deadline is expected to pass."""

_QUEUED = 50 * 1024 * 1024  # more bytes than any socket buffers

T = TypeVar("T")


@dataclass(frozen=True)
class TransportUnderTest:
    """A transport on the real clock, a poller for its links, and an address it can listen on."""

    transport: Transport
    poller: Poller
    address: str


class BackgroundTask(Generic[T]):
    """A function that runs on its own thread, because it may block or must not."""

    def __init__(self, action: Callable[[], T]) -> None:
        self._action = action
        self._result: list[T] = []
        self._error: BaseException | None = None
        self.thread = threading.Thread(target=self._run, name="background", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            self._result.append(self._action())
        except BaseException as error:  # noqa: BLE001 - raised again by result()
            self._error = error

    def result(self, what: str) -> T:
        """Return the result of the action. `what` describes the action in the error if it does not finish."""
        self.thread.join(PATIENCE)
        if self.thread.is_alive():
            raise BrokenPromise(f"{what} did not finish within {PATIENCE:g} s")
        if self._error is not None:
            raise self._error
        return self._result[0]


class Harness:
    """Runs one check on one transport and cleans up after it."""

    def __init__(self, under_test: TransportUnderTest) -> None:
        self.transport = under_test.transport
        self.poller = under_test.poller
        self._address = under_test.address
        self._listener: Listener | None = None
        self._tasks: list[threading.Thread] = []
        self._stack = ExitStack()

    def close(self) -> None:
        """Close everything that was opened, and join the background threads."""
        self._stack.close()
        for thread in self._tasks:
            thread.join(PATIENCE)
        self._stack.close()  # what background threads opened meanwhile

    def listener(self) -> Listener:
        """Return the listener, opened on first use."""
        if self._listener is None:
            self._listener = self.transport.listen(self._address)
            self._stack.callback(self._listener.close)
        return self._listener

    def connect(self, listener: Listener | None = None) -> BackgroundTask[Link]:
        """Connect on another thread: with some transports this ends only when the listener's side has received."""
        address = (listener or self.listener()).address

        def connect() -> Link:
            link = self.transport.connect(address, time.monotonic() + PATIENCE)
            self._stack.callback(link.close)
            return link

        return self.in_background(connect)

    def accept(self, listener: Listener | None = None) -> Link:
        """Accept the next connection, which the poller has to report."""
        listener = listener or self.listener()
        self.poller.add(listener, read=True)
        deadline = time.monotonic() + PATIENCE
        while (link := listener.accept()) is None:
            self.poller.wait(deadline)
            if time.monotonic() >= deadline:
                raise BrokenPromise("a connection was not accepted")
        self.poller.remove(listener)
        self._stack.callback(link.close)
        return link

    def pair(self, *, admitted: bool = True, listener: Listener | None = None) -> tuple[Link, Link]:
        """Return the connecting and the accepting end of a connection, both admitted unless told otherwise."""
        connecting = self.connect(listener)
        server = self.accept(listener)
        while connecting.thread.is_alive():
            expect(not list(server.receive()), "a frame arrived before anything was sent")
            connecting.thread.join(0.001)
        client = connecting.result("connecting")
        client.send(Kind.HANDSHAKE, b"", 0, 0, 0)  # now both ends know that they are connected
        self.read(server, 1)
        if admitted:
            client.admit(Limits(), allocate)
            server.admit(Limits(), allocate)
        return client, server

    def in_background(self, action: Callable[[], T]) -> BackgroundTask[T]:
        """Run `action` on another thread."""
        task = BackgroundTask(action)
        self._tasks.append(task.thread)
        return task

    def read(self, link: Link, count: int, *, sender: Link | None = None) -> list[Frame]:
        """Read `count` frames. Pass `sender` if no other thread flushes the sending end."""
        deadline = time.monotonic() + PATIENCE
        frames: list[Frame] = []
        while True:
            frames.extend(link.receive())
            if len(frames) >= count:
                expect(len(frames) == count, f"{len(frames)} frames arrived where {count} were sent")
                return frames
            queued = sender is not None and sender.unsent()
            if sender is not None and queued:
                sender.flush()
            link.wait(time.monotonic() + SHORT if queued else deadline)
            if time.monotonic() >= deadline:
                raise BrokenPromise(f"{len(frames)} of {count} frames arrived within {PATIENCE:g} s")

    def read_to_the_end(self, link: Link) -> tuple[list[Frame], Exception]:
        """Read all frames, and the error that ends them: LinkClosed, or ProtocolError for an illegal frame."""
        deadline = time.monotonic() + PATIENCE
        frames: list[Frame] = []
        while time.monotonic() < deadline:
            try:
                for frame in link.receive():
                    frames.append(frame)  # one at a time: frames before an error count
            except (LinkClosed, ProtocolError) as error:
                return frames, error
            link.wait(deadline)
        raise BrokenPromise(f"the link did not end within {PATIENCE:g} s; {len(frames)} frames arrived")

    def polled(self, item: Link | Listener) -> int:
        """Return what the poller reports for `item` within `SHORT` seconds."""
        return self._polled(item, SHORT)

    def poll_for(self, item: Link | Listener, ready: int) -> None:
        """Wait until the poller reports `ready` for `item`."""
        found = self._polled(item, PATIENCE, ready)
        expect(bool(found & ready), f"the poller did not report {ready!r} within {PATIENCE:g} s")

    def _polled(self, item: Link | Listener, seconds: float, until: int = ~Ready.NOTHING) -> int:
        deadline = time.monotonic() + seconds
        while True:
            for found, ready in self.poller.wait(deadline):
                if found is item and ready & until:
                    return ready
            if time.monotonic() >= deadline:
                return Ready.NOTHING


def allocate(sequence: int, length: int) -> memoryview:
    """Return new memory for a chunk."""
    return memoryview(bytearray(length))


def expect(holds: bool, otherwise: str) -> None:
    """Raise `BrokenPromise` with the message `otherwise` unless the condition holds."""
    if not holds:
        raise BrokenPromise(otherwise)


def expect_same(frames: list[Frame], sent: list[tuple[int, bytes, int]]) -> None:
    """Check that all frames arrived unchanged (kind, body and sequence), in order within each lane."""
    for lane in sorted({lane_of(kind) for kind, _, _ in sent}):
        arrived = [(frame.kind, bytes(frame.body), frame.sequence) for frame in frames if lane_of(frame.kind) == lane]
        expected = [entry for entry in sent if lane_of(entry[0]) == lane]
        expect(
            [sequence for _, _, sequence in arrived] == [sequence for _, _, sequence in expected],
            f"lane {lane}: {len(expected)} frames were sent, and {len(arrived)} arrived or their order changed",
        )
        expect(arrived == expected, f"a frame of lane {lane} changed in transit")


def send_all(link: Link, frames: list[tuple[int, bytes, int]]) -> None:
    """Send frames given as kind, body and sequence."""
    for kind, body, sequence in frames:
        link.send(kind, body, sequence, 0, 0)


def queue_bulk(link: Link) -> list[tuple[int, bytes, int]]:
    """Send 50 MB of chunks, more than a connection buffers, and return them."""
    sent = []
    for sequence in range(1, _QUEUED // CHUNK + 1):
        sent.append((BULK_CHUNK, bytes([sequence % 251]) * CHUNK, sequence))
        link.send(BULK_CHUNK, sent[-1][1], sequence, 0, 0)
    return sent


def check_deadline(wait: Callable[[float | None], object], nothing: object) -> None:
    """Check that a wait during which nothing happens ends at its deadline, and not before."""
    for seconds in (-1.0, 0.0, SHORT):
        deadline = time.monotonic() + seconds
        result = wait(deadline)
        late = time.monotonic() - deadline
        expect(result == nothing, f"{result!r} was reported although nothing happened")
        expect(late > -0.002, f"a wait ended {-late:.3f} s before its deadline")
        expect(late < 1 + PATIENCE, f"a wait ended {late:.3f} s after its deadline")


def check_wake(
    harness: Harness, wake: Callable[[], None], wait: Callable[[float | None], object], nothing: object
) -> None:
    """Check that `wake` ends the current wait or else the next one, and only one."""
    for _ in range(20):
        waiting = harness.in_background(lambda: wait(time.monotonic() + 2 * PATIENCE))
        wake()
        result = waiting.result("a wait that was woken")
        expect(result == nothing, f"{result!r} was reported after wake")
    wake()
    wake()
    harness.in_background(lambda: wait(time.monotonic() + 2 * PATIENCE)).result("the wait after wake")
    check_deadline(wait, nothing)


Check = Callable[[Harness], None]
"""Raises `BrokenPromise` if a transport violates one rule. Its name states the rule."""
