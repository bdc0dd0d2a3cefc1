"""What the promises of a transport are tried on: connected links, reading with patience, and errands on other threads.

Nothing here waits for ever: what does not come within `PATIENCE` is a promise that was broken.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Generic, TypeVar

from telegrad.errors import ProtocolError
from telegrad.transport.base import Link, LinkClosed, Listener, Poller, Ready, Transport
from telegrad.wire.frames import Frame, Limits

PATIENCE = 20.0
"""Seconds for what should take no time: long, because machines that run tests are busy."""
SHORT = 0.03
"""Seconds that are waited where a deadline is expected to pass."""

T = TypeVar("T")


class BrokenPromise(AssertionError):
    """A transport does not do what `telegrad.transport.base` says that transports do."""


@dataclass(frozen=True)
class TransportUnderTest:
    """A transport on the real clock, a poller for its links, and an address that it can listen at."""

    transport: Transport
    poller: Poller
    address: str


class Errand(Generic[T]):
    """Something done on a thread of its own, because it may wait, or must not."""

    def __init__(self, action: Callable[[], T]) -> None:
        self._action = action
        self._result: list[T] = []
        self._error: BaseException | None = None
        self.thread = threading.Thread(target=self._run, name="errand", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            self._result.append(self._action())
        except BaseException as error:  # noqa: BLE001 - raised again by result()
            self._error = error

    def result(self, what: str) -> T:
        """What the action returned; `what` says, if it does not end, what should have."""
        self.thread.join(PATIENCE)
        if self.thread.is_alive():
            raise BrokenPromise(f"{what} did not end within {PATIENCE:g} s")
        if self._error is not None:
            raise self._error
        return self._result[0]


class Bench:
    """One promise is tried on one bench, which clears up behind it."""

    def __init__(self, under_test: TransportUnderTest) -> None:
        self.transport = under_test.transport
        self.poller = under_test.poller
        self._address = under_test.address
        self._listener: Listener | None = None
        self._errands: list[threading.Thread] = []
        self._stack = ExitStack()

    def close(self) -> None:
        """Close what was opened, and wait for the errands."""
        self._stack.close()
        for thread in self._errands:
            thread.join(PATIENCE)

    def listener(self) -> Listener:
        """The one listener of this bench."""
        if self._listener is None:
            self._listener = self.transport.listen(self._address)
            self._stack.callback(self._listener.close)
        return self._listener

    def connect(self) -> Link:
        """A connection to the listener."""
        link = self.transport.connect(self.listener().address, time.monotonic() + PATIENCE)
        self._stack.callback(link.close)
        return link

    def accept(self) -> Link:
        """The other end of a connection; the poller is asked to find it."""
        listener = self.listener()
        self.poller.add(listener, read=True)
        deadline = time.monotonic() + PATIENCE
        while (link := listener.accept()) is None:
            self.poller.wait(deadline)
            if time.monotonic() >= deadline:
                raise BrokenPromise("a connection was not accepted")
        self.poller.remove(listener)
        self._stack.callback(link.close)
        return link

    def pair(self, *, admitted: bool = True) -> tuple[Link, Link]:
        """Both ends of a connection, after their handshake unless told otherwise."""
        here = self.connect()
        there = self.accept()
        if admitted:
            here.admit(Limits(), allocate)
            there.admit(Limits(), allocate)
        return here, there

    def errand(self, action: Callable[[], T]) -> Errand[T]:
        """Do something on another thread."""
        errand = Errand(action)
        self._errands.append(errand.thread)
        return errand

    def read(self, link: Link, count: int, *, sender: Link | None = None) -> list[Frame]:
        """The next `count` frames. Where the other end has no thread of its own, `sender` is flushed between reads."""
        deadline = time.monotonic() + PATIENCE
        frames: list[Frame] = []
        while True:
            frames.extend(link.receive())
            if len(frames) >= count:
                expect(len(frames) == count, f"{len(frames)} frames came where {count} were sent")
                return frames
            queued = sender is not None and sender.unsent()
            if sender is not None and queued:
                sender.flush()
            link.wait(time.monotonic() + SHORT if queued else deadline)
            if time.monotonic() >= deadline:
                raise BrokenPromise(f"{len(frames)} of {count} frames came within {PATIENCE:g} s")

    def read_to_the_end(self, link: Link) -> tuple[list[Frame], Exception]:
        """All frames, and what ended the reading: LinkClosed, or a ProtocolError for what must not be sent."""
        deadline = time.monotonic() + PATIENCE
        frames: list[Frame] = []
        while time.monotonic() < deadline:
            try:
                frames.extend(_noted(link, frames))
            except (LinkClosed, ProtocolError) as error:
                return frames, error
            link.wait(deadline)
        raise BrokenPromise(f"the link did not end within {PATIENCE:g} s; {len(frames)} frames came")

    def polled(self, item: Link | Listener) -> int:
        """What the poller says of `item` within a short while."""
        return self._polled(item, SHORT)

    def poll_for(self, item: Link | Listener, ready: int) -> None:
        """See the poller report `ready` for `item`."""
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


def _noted(link: Link, frames: list[Frame]) -> list[Frame]:
    # One at a time: those before an error count.
    for frame in link.receive():
        frames.append(frame)
    return []


def allocate(sequence: int, length: int) -> memoryview:
    """A place of its own for every chunk."""
    return memoryview(bytearray(length))


def expect(holds: bool, otherwise: str) -> None:
    """Raise BrokenPromise, with what happened instead, unless it holds."""
    if not holds:
        raise BrokenPromise(otherwise)
