"""A region belongs to its receiver until it is released, and no memory or file descriptor leaks."""

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

from telegrad.errors import ProtocolError
from telegrad.transport import slab_sender
from telegrad.transport.shared_memory import SharedMemory
from telegrad.transport.slab_pool import Lease, Slab, SlabPool
from telegrad.transport.slab_sender import SlabSender
from telegrad.transport.unix import UnixLink
from telegrad.wire.frames import ABOUT_SLABS, Frame, Kind, Limits
from telegrad.wire.slab_messages import pack_answer, pack_forget, pack_offer, pack_return

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
            if frame.kind in ABOUT_SLABS:
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


def test_the_receiver_sees_what_the_sender_writes_without_a_copy() -> None:
    with two_ends() as (a, b):
        share_slab(a, b, MB)
        lease, tensor = send(a, b, b"x" * MB)
        assert bool((tensor == ord("x")).all())
        lease.view[0] = ord("y")  # telegrad never does this
        assert int(tensor[0]) == ord("y")


def test_no_region_is_leased_before_the_peer_has_mapped_the_slab() -> None:
    with two_ends() as (a, b):
        assert a.memory.allocate(MB) is None
        assert a.memory.allocate(MB) is None
        b.read()
        assert a.memory.allocate(MB) is None
        a.read()
        assert a.memory.allocate(MB) is not None


def test_a_region_is_reused_only_after_it_was_released() -> None:
    with two_ends() as (a, b):
        share_slab(a, b, MB)
        first, tensor = send(a, b, b"1" * MB)
        second, other = send(a, b, b"2" * MB)
        assert first.offset != second.offset
        assert a.memory.allocate(MB) is None, "there was room for two"
        part = tensor[5:10]
        del tensor
        assert b.memory.take_releases() == (0, 0)
        assert bytes(part.tolist()) == b"11111"
        del part
        numbers = b.memory.take_releases()
        assert numbers == (first.number, 0)
        a.memory.apply_releases(*numbers)
        third, _ = send(a, b, b"3" * MB)
        assert third.offset == first.offset
        assert bytes(other[:3].tolist()) == b"222"


def test_a_lease_that_is_dropped_before_it_was_sent_is_free_again() -> None:
    with two_ends() as (a, b):
        share_slab(a, b, MB)
        offsets = set()
        for _ in range(10):
            lease = a.memory.allocate(MB)
            assert lease is not None
            offsets.add(lease.offset)
        assert len(offsets) <= 2


def test_many_regions_are_released_in_one_frame() -> None:
    with two_ends() as (a, b):
        share_slab(a, b, 8 * MB)
        kept = [send(a, b, b"x" * 100_000)[1] for _ in range(10)]
        assert sum(slab.allocator.in_use for slab in a.pool.slabs) == 10 * 114_688
        kept.clear()
        b.read()
        a.read()
        assert sum(slab.allocator.in_use for slab in a.pool.slabs) == 0
        assert b.memory.take_releases() == (0, 0)


def test_regions_can_become_unused_in_any_thread() -> None:
    with two_ends() as (a, b):
        share_slab(a, b, 16 * MB)
        for _ in range(50):
            tensors = [send(a, b, b"x" * 100_000)[1] for _ in range(8)]
            threads = [threading.Thread(target=tensors.pop) for _ in range(8)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(20)
            release_all(a, b)
        assert sum(slab.allocator.in_use for slab in a.pool.slabs) == 0


def test_the_limit_is_respected_and_a_region_that_does_not_fit_is_not_leased() -> None:
    with two_ends(here=8 * MB) as (a, b):
        kept = []
        for _ in range(100):
            lease = a.memory.allocate(MB)
            b.read()
            a.read()
            assert a.pool.total <= 8 * MB
            if lease is not None:
                a.memory.mark_sent(lease)
                kept.append(lease)
        assert 3 <= len(kept) <= 8
        assert a.memory.allocate(9 * MB) is None
        assert a.pool.total <= 8 * MB


def test_an_idle_slab_is_replaced_by_one_of_another_size_on_both_sides() -> None:
    before = mapped()
    with two_ends(here=13 * MB) as (a, b):
        share_slab(a, b, MB)
        send(a, b, b"x" * MB)
        release_all(a, b)
        share_slab(a, b, 12 * MB)
        assert a.memory.allocate(12 * MB) is not None
        assert len(a.pool.slabs) == 1
        assert mapped() == before + 2
    assert mapped() == before


def test_a_slab_in_use_is_not_replaced() -> None:
    with two_ends(here=16 * MB) as (a, b):
        share_slab(a, b, MB)
        _, tensor = send(a, b, b"x" * MB)
        for _ in range(3):
            assert a.memory.allocate(15 * MB) is None
            b.read()
            a.read()
        assert bool((tensor == ord("x")).all())


@pytest.mark.parametrize("bounds", [(0, 64 * MB), (64 * MB, 0), (64 * MB, MB // 2)])
def test_nothing_is_shared_if_one_side_does_not_permit_it(bounds: tuple[int, int]) -> None:
    before, fds = mapped(), descriptors()
    with two_ends(*bounds) as (a, b):
        for _ in range(5):
            assert a.memory.allocate(MB) is None
            b.read()
            a.read()
        assert mapped() == before
        assert a.pool.total == 0
    assert descriptors() <= fds


def test_nothing_is_shared_if_the_system_refuses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(size: int) -> int:
        raise PermissionError("memfd_create is not permitted here")

    monkeypatch.setattr(slab_sender, "make_memory", refuse)
    with two_ends() as (a, b):
        for _ in range(3):
            assert a.memory.allocate(MB) is None
            assert b.read() == []
        assert a.pool.total == 0


def test_a_tensor_outlives_the_connection_and_the_sender() -> None:
    before = mapped()
    with two_ends() as (a, b):
        share_slab(a, b, MB)
        tensor = send(a, b, b"x" * MB)[1]
    del a, b
    assert mapped() == before + 1
    tensor.add_(1)
    assert bool((tensor == ord("y")).all())
    del tensor
    assert mapped() == before


def test_closing_a_connection_leaks_no_memory_and_no_descriptor() -> None:
    before, fds = mapped(), descriptors()
    with two_ends() as (a, b):
        share_slab(a, b, MB)
        share_slab(b, a, MB)
        a.memory.allocate(32 * MB)  # an offer that is never read
        assert mapped() > before
    assert mapped() == before
    assert descriptors() <= fds
    assert a.pool.total == b.pool.total == 0
    assert a.memory.allocate(MB) is None


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


def test_two_threads_that_find_no_room_at_the_same_time_make_one_offer(monkeypatch: pytest.MonkeyPatch) -> None:
    with two_ends() as (a, b):
        with meanwhile(monkeypatch, a.pool, lambda: a.memory.allocate(MB)):
            assert a.memory.allocate(MB) is None
        b.read()
        a.read()
        assert len(a.pool.slabs) == 1
        assert a.memory.allocate(MB) is not None


def test_closing_a_connection_during_an_offer_leaks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    before = mapped()
    with two_ends() as (a, _):
        with meanwhile(monkeypatch, a.pool, a.memory.close):
            assert a.memory.allocate(MB) is None
        assert (a.pool.total, a.pool.slabs) == (0, [])
    assert mapped() == before


def test_a_slab_is_forgotten_before_its_peer_can_be_offered_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """One thread replaces a slab of the second peer while another offers that peer a new one."""
    with two_ends(here=8 * MB) as (a, _), two_ends(there=8 * MB) as (c, d):
        c.pool = a.pool
        c.memory.close()
        c.memory = SharedMemory(a.pool, c.link)
        share_slab(c, d, 3 * MB)
        forgot = SlabSender.forget

        def late(sender: SlabSender, slab: Slab) -> None:
            thread = threading.Thread(target=lambda: (c.memory.allocate(2 * MB), went_on.set()))
            thread.start()
            threads.append(thread)
            assert went_on.wait(20)
            forgot(sender, slab)

        went_on, threads = threading.Event(), list[threading.Thread]()
        with monkeypatch.context() as patched:
            patched.setattr(a.pool, "lock", ObservedLock(went_on))
            patched.setattr(SlabSender, "forget", late)
            assert a.memory.allocate(3 * MB) is None
            for thread in threads:
                thread.join(20)
        assert threads
        for _ in range(2):
            d.read()
            c.read()
            c.memory.allocate(MB // 2)
        assert c.memory.allocate(MB // 2) is not None, "the peer has refused shared memory permanently"


def test_events_just_after_the_end_of_a_connection_keep_no_memory() -> None:
    """One thread closes the connection while another is about to send a region, or has just read an offer."""
    before = mapped()
    with two_ends() as (a, b):
        share_slab(a, b, MB)
        lease = a.memory.allocate(MB)
        assert lease is not None
        assert b.memory.allocate(MB) is None  # b offers
        a.memory.close()
        a.memory.mark_sent(lease)
        a.read()
        b.memory.close()
        del lease
        assert mapped() == before


def test_a_region_that_a_forked_child_can_see_is_never_released() -> None:
    with two_ends() as (a, b):
        share_slab(a, b, MB)
        _, tensor = send(a, b, b"x" * MB)
        child = os.fork()
        if child == 0:
            os._exit(0)
        os.waitpid(child, 0)
        _, later = send(a, b, b"y" * MB)
        del tensor
        assert b.memory.take_releases() == (0, 0)
        del later
        assert b.memory.take_releases() != (0, 0), "regions received after the fork are released"


# -- peers that violate the protocol--------------------------------------------------------------------------


def test_releasing_a_region_that_is_not_in_use_is_a_protocol_error() -> None:
    with two_ends() as (a, b):
        share_slab(a, b, MB)
        lease, _ = send(a, b, b"x" * MB)
        a.memory.apply_releases(lease.number, 0)
        for number in (lease.number, 10**6):
            with pytest.raises(ProtocolError, match="not in use"):
                a.memory.apply_releases(number, 0)
            with pytest.raises(ProtocolError, match="not in use"):
                a.memory.handle_frame(Kind.RETURN, pack_return([number]))


@pytest.mark.parametrize(
    ("slab", "offset", "size"),
    [(9, 0, MB), (0, -16, MB), (0, 8, MB), (0, 0, 0), (0, 0, -1), (0, 0, 3 * MB), (0, 2 * MB, MB), (0, 2**63, MB)],
)
def test_a_region_outside_of_the_offered_slabs_is_a_protocol_error(slab: int, offset: int, size: int) -> None:
    with two_ends() as (a, b):
        share_slab(a, b, MB)
        offered = a.pool.slabs[0].id
        with pytest.raises(ProtocolError):
            b.memory.open_region(offered + slab, offset, size, 1)


def test_a_region_number_that_is_in_use_is_a_protocol_error() -> None:
    with two_ends() as (a, b):
        share_slab(a, b, MB)
        offered = a.pool.slabs[0].id
        kept = b.memory.open_region(offered, 0, 100, 1)
        for number in (0, 1):
            with pytest.raises(ProtocolError, match="already in use"):
                b.memory.open_region(offered, 4096, 100, number)
        assert len(kept) == 100


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (Kind.ANSWER, pack_answer(77, True)),
        (Kind.FORGET, pack_forget(77)),
        (Kind.OFFER, pack_offer(77, 4097)),
        (Kind.OFFER, b"short"),
        (Kind.RETURN, b"short"),
    ],
)
def test_invalid_frames_about_slabs_are_protocol_errors(kind: Kind, body: bytes) -> None:
    with two_ends() as (a, _), pytest.raises(ProtocolError):
        a.memory.handle_frame(kind, body)


def test_an_offer_without_sealed_memory_is_refused(tmp_path: Path) -> None:
    with two_ends() as (a, b):
        a.link.send(Kind.OFFER, pack_offer(5, MB), 0, 0, 0)  # without a file descriptor
        plain = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
        assert a.link.offer(pack_offer(6, MB), plain)
        os.close(plain)
        b.read()
        answers = [bytes(frame.body) for frame in a.link.receive()]
        assert answers == [pack_answer(5, False), pack_answer(6, False)]
