"""Two connected ends that share memory, for tests of its modules."""

from __future__ import annotations

import gc
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch

from telegrad.transport import slab_sender
from telegrad.transport.shared_memory import SharedMemory
from telegrad.transport.slab_pool import Lease, SlabPool
from telegrad.transport.unix import UnixLink
from telegrad.wire.frames import SLAB_KINDS, Frame, Limits

MB = 1 << 20


def mapped() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:telegrad")


def descriptors() -> set[tuple[str, str]]:
    """Return the open descriptors. Threads of earlier tests may close theirs at any time, so look for new ones."""
    gc.collect()
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the descriptor that listed them is closed by now
            found.add((fd, os.readlink(f"/proc/self/fd/{fd}")))
    return found


class End:
    """One end of a connection."""

    def __init__(self, sock: socket.socket, bound: int) -> None:
        self.link = UnixLink(sock, peer="the other end")
        self.link.admit(Limits(), lambda sequence, length: None)
        self.pool = SlabPool(bound)
        self.memory = SharedMemory(self.pool, self.link)

    def read(self) -> list[Frame]:
        """Handle the received frames about slabs, and return the rest."""
        rest = []
        for frame in self.link.receive():
            if frame.kind in SLAB_KINDS:
                self.memory.handle_frame(frame.kind, frame.body)
            else:
                rest.append(frame)
        self.memory.send_releases()
        return rest


@contextmanager
def two_ends(here: int = 64 * MB, there: int = 64 * MB) -> Iterator[tuple[End, End]]:
    left, right = socket.socketpair()
    a, b = End(left, here), End(right, there)
    try:
        yield a, b
    finally:
        for end in (a, b):
            end.memory.close()
            end.link.close()


def share_slab(sender: End, receiver: End, size: int) -> None:
    """Share a slab with room for `size` bytes."""
    assert sender.memory.allocate(size) is None
    receiver.read()
    sender.read()


def send(sender: End, receiver: End, content: bytes) -> tuple[Lease, torch.Tensor]:
    lease = sender.memory.allocate(len(content))
    assert lease is not None
    lease.view[: len(content)] = content
    sender.memory.mark_sent(lease)
    view = receiver.memory.open_region(lease.slab, lease.offset, len(content), lease.number)
    return lease, torch.frombuffer(view, dtype=torch.uint8)


def release_all(sender: End, receiver: End) -> None:
    while any(numbers := receiver.memory.take_releases()):
        sender.memory.apply_releases(*numbers)


class ObservedLock:
    """A lock that sets an event when a thread has to wait for it."""

    def __init__(self, contended: threading.Event) -> None:
        self._lock = threading.Lock()
        self._contended = contended

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            self._contended.set()
            self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


@contextmanager
def meanwhile(monkeypatch: pytest.MonkeyPatch, pool: SlabPool, other: Callable[[], object]) -> Iterator[None]:
    """While memory is allocated in the block, run `other` in a second thread until it returns or waits for the lock."""
    make, went_on = slab_sender.make_memory, threading.Event()
    threads: list[threading.Thread] = []

    def run() -> None:
        other()
        went_on.set()

    def interleaved(size: int) -> int:
        if not threads:
            threads.append(threading.Thread(target=run))
            threads[0].start()
            assert went_on.wait(20)
        return make(size)

    with monkeypatch.context() as patched:
        patched.setattr(pool, "lock", ObservedLock(went_on))
        patched.setattr(slab_sender, "make_memory", interleaved)
        yield
        for thread in threads:
            thread.join(20)
        assert threads
