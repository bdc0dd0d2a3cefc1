"""A region belongs to its receiver until it comes back; what cannot be shared is not shared, and nothing is lost."""

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
from telegrad.transport import slabs
from telegrad.transport.slabs import Lender, Loan, SharedMemory, Slab, SlabPool
from telegrad.transport.unix import UnixLink
from telegrad.wire.frames import SLAB_KINDS, Frame, Kind, Limits
from telegrad.wire.slab_messages import pack_region_free, pack_slab_offer, pack_slab_reply, pack_slab_unmap

MB = 1 << 20


def mapped() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:telegrad")


def descriptors() -> set[tuple[str, str]]:
    """What is open. Threads of earlier tests may close theirs at any time, so tests look for what has come."""
    gc.collect()
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the one that lists them is closed by now
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
        """Take what came about slabs, and return the rest."""
        rest = []
        for frame in self.link.receive():
            if frame.kind in SLAB_KINDS:
                self.memory.heard(frame.kind, frame.body)
            else:
                rest.append(frame)
        self.memory.give_back()
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


def agree(lender: End, borrower: End, size: int) -> None:
    """Let the two agree on a slab with room for `size`."""
    assert lender.memory.take(size) is None
    borrower.read()
    lender.read()


def lend(lender: End, borrower: End, content: bytes) -> tuple[Loan, torch.Tensor]:
    loan = lender.memory.take(len(content))
    assert loan is not None
    loan.view[: len(content)] = content
    lender.memory.hand_over(loan)
    view = borrower.memory.region(loan.slab, loan.offset, len(content), loan.number)
    return loan, torch.frombuffer(view, dtype=torch.uint8)


def give_all_back(lender: End, borrower: End) -> None:
    while any(numbers := borrower.memory.riding()):
        lender.memory.came_back(*numbers)


def test_what_is_written_on_one_side_is_seen_on_the_other_without_a_copy() -> None:
    with two_ends() as (a, b):
        agree(a, b, MB)
        loan, tensor = lend(a, b, b"x" * MB)
        assert bool((tensor == ord("x")).all())
        loan.view[0] = ord("y")  # which the sender never does
        assert int(tensor[0]) == ord("y")


def test_nothing_is_lent_before_the_peer_has_mapped_it() -> None:
    with two_ends() as (a, b):
        assert a.memory.take(MB) is None
        assert a.memory.take(MB) is None
        b.read()
        assert a.memory.take(MB) is None
        a.read()
        assert a.memory.take(MB) is not None


def test_a_region_is_used_again_only_after_it_came_back() -> None:
    with two_ends() as (a, b):
        agree(a, b, MB)
        first, tensor = lend(a, b, b"1" * MB)
        second, other = lend(a, b, b"2" * MB)
        assert first.offset != second.offset
        assert a.memory.take(MB) is None, "there was room for two"
        part = tensor[5:10]
        del tensor
        assert b.memory.riding() == (0, 0)
        assert bytes(part.tolist()) == b"11111"
        del part
        numbers = b.memory.riding()
        assert numbers == (first.number, 0)
        a.memory.came_back(*numbers)
        third, _ = lend(a, b, b"3" * MB)
        assert third.offset == first.offset
        assert bytes(other[:3].tolist()) == b"222"


def test_a_loan_that_is_dropped_before_it_was_handed_over_is_free_again() -> None:
    with two_ends() as (a, b):
        agree(a, b, MB)
        offsets = set()
        for _ in range(10):
            loan = a.memory.take(MB)
            assert loan is not None
            offsets.add(loan.offset)
        assert len(offsets) <= 2


def test_many_dead_regions_go_back_in_one_frame() -> None:
    with two_ends() as (a, b):
        agree(a, b, 8 * MB)
        kept = [lend(a, b, b"x" * 100_000)[1] for _ in range(10)]
        assert sum(slab.arena.in_use for slab in a.pool.slabs) == 10 * 114_688
        kept.clear()
        b.read()
        a.read()
        assert sum(slab.arena.in_use for slab in a.pool.slabs) == 0
        assert b.memory.riding() == (0, 0)


def test_regions_die_in_any_thread() -> None:
    with two_ends() as (a, b):
        agree(a, b, 16 * MB)
        for _ in range(50):
            tensors = [lend(a, b, b"x" * 100_000)[1] for _ in range(8)]
            threads = [threading.Thread(target=tensors.pop) for _ in range(8)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(20)
            give_all_back(a, b)
        assert sum(slab.arena.in_use for slab in a.pool.slabs) == 0


def test_the_bound_is_kept_and_what_does_not_fit_is_not_lent() -> None:
    with two_ends(here=8 * MB) as (a, b):
        kept = []
        for _ in range(100):
            loan = a.memory.take(MB)
            b.read()
            a.read()
            assert a.pool.total <= 8 * MB
            if loan is not None:
                a.memory.hand_over(loan)
                kept.append(loan)
        assert 3 <= len(kept) <= 8
        assert a.memory.take(9 * MB) is None
        assert a.pool.total <= 8 * MB


def test_an_idle_slab_makes_room_for_one_of_another_size_and_is_forgotten_by_both() -> None:
    before = mapped()
    with two_ends(here=13 * MB) as (a, b):
        agree(a, b, MB)
        lend(a, b, b"x" * MB)
        give_all_back(a, b)
        agree(a, b, 12 * MB)
        assert a.memory.take(12 * MB) is not None
        assert len(a.pool.slabs) == 1
        assert mapped() == before + 2
    assert mapped() == before


def test_a_slab_in_use_is_not_forgotten() -> None:
    with two_ends(here=16 * MB) as (a, b):
        agree(a, b, MB)
        _, tensor = lend(a, b, b"x" * MB)
        for _ in range(3):
            assert a.memory.take(15 * MB) is None
            b.read()
            a.read()
        assert bool((tensor == ord("x")).all())


@pytest.mark.parametrize("bounds", [(0, 64 * MB), (64 * MB, 0), (64 * MB, MB // 2)])
def test_nothing_is_shared_where_one_side_does_not_permit_it(bounds: tuple[int, int]) -> None:
    before, fds = mapped(), descriptors()
    with two_ends(*bounds) as (a, b):
        for _ in range(5):
            assert a.memory.take(MB) is None
            b.read()
            a.read()
        assert mapped() == before
        assert a.pool.total == 0
    assert descriptors() <= fds


def test_nothing_is_shared_where_the_system_refuses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(size: int) -> int:
        raise PermissionError("memfd_create is not permitted here")

    monkeypatch.setattr(slabs, "make_memory", refuse)
    with two_ends() as (a, b):
        for _ in range(3):
            assert a.memory.take(MB) is None
            assert b.read() == []
        assert a.pool.total == 0


def test_a_tensor_outlives_the_connection_and_the_sender() -> None:
    before = mapped()
    with two_ends() as (a, b):
        agree(a, b, MB)
        tensor = lend(a, b, b"x" * MB)[1]
    del a, b
    assert mapped() == before + 1
    tensor.add_(1)
    assert bool((tensor == ord("y")).all())
    del tensor
    assert mapped() == before


def test_the_end_of_a_connection_leaves_no_memory_and_no_descriptor() -> None:
    before, fds = mapped(), descriptors()
    with two_ends() as (a, b):
        agree(a, b, MB)
        agree(b, a, MB)
        a.memory.take(32 * MB)  # an offer that nobody reads
        assert mapped() > before
    assert mapped() == before
    assert descriptors() <= fds
    assert a.pool.total == b.pool.total == 0
    assert a.memory.take(MB) is None


class ToldLock:
    """A lock that says when a thread has to wait for it."""

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
    """When memory is made in the block, `other` runs in a second thread, until it has returned or waits for a lock."""
    make, went_on = slabs.make_memory, threading.Event()
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
        patched.setattr(pool, "lock", ToldLock(went_on))
        patched.setattr(slabs, "make_memory", interleaved)
        yield
        for thread in threads:
            thread.join(20)
        assert threads


def test_two_threads_that_find_no_room_at_once_make_one_offer(monkeypatch: pytest.MonkeyPatch) -> None:
    with two_ends() as (a, b):
        with meanwhile(monkeypatch, a.pool, lambda: a.memory.take(MB)):
            assert a.memory.take(MB) is None
        b.read()
        a.read()
        assert len(a.pool.slabs) == 1
        assert a.memory.take(MB) is not None


def test_the_end_of_a_connection_during_an_offer_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    before = mapped()
    with two_ends() as (a, _):
        with meanwhile(monkeypatch, a.pool, a.memory.close):
            assert a.memory.take(MB) is None
        assert (a.pool.total, a.pool.slabs) == (0, [])
    assert mapped() == before


def test_a_slab_is_forgotten_before_its_peer_can_be_offered_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """One thread drops a slab of the second peer, for the first; another offers that peer a new one meanwhile."""
    with two_ends(here=8 * MB) as (a, _), two_ends(there=8 * MB) as (c, d):
        c.pool = a.pool
        c.memory.close()
        c.memory = SharedMemory(a.pool, c.link)
        agree(c, d, 3 * MB)
        forgot = Lender.forget

        def late(lender: Lender, slab: Slab) -> None:
            thread = threading.Thread(target=lambda: (c.memory.take(2 * MB), went_on.set()))
            thread.start()
            threads.append(thread)
            assert went_on.wait(20)
            forgot(lender, slab)

        went_on, threads = threading.Event(), list[threading.Thread]()
        with monkeypatch.context() as patched:
            patched.setattr(a.pool, "lock", ToldLock(went_on))
            patched.setattr(Lender, "forget", late)
            assert a.memory.take(3 * MB) is None
            for thread in threads:
                thread.join(20)
        assert threads
        for _ in range(2):
            d.read()
            c.read()
            c.memory.take(MB // 2)
        assert c.memory.take(MB // 2) is not None, "the peer has refused, for good"


def test_what_comes_just_after_the_end_of_a_connection_keeps_no_memory() -> None:
    """One thread ends the connection while another is about to hand a region over, or has just read an offer."""
    before = mapped()
    with two_ends() as (a, b):
        agree(a, b, MB)
        loan = a.memory.take(MB)
        assert loan is not None
        assert b.memory.take(MB) is None  # b offers
        a.memory.close()
        a.memory.hand_over(loan)
        a.read()
        b.memory.close()
        del loan
        assert mapped() == before


def test_what_a_forked_child_can_see_never_comes_back() -> None:
    with two_ends() as (a, b):
        agree(a, b, MB)
        _, tensor = lend(a, b, b"x" * MB)
        child = os.fork()
        if child == 0:
            os._exit(0)
        os.waitpid(child, 0)
        _, later = lend(a, b, b"y" * MB)
        del tensor
        assert b.memory.riding() == (0, 0)
        del later
        assert b.memory.riding() != (0, 0), "what came after the fork does come back"


# -- peers that do not keep to it -----------------------------------------------------------------------------


def test_a_region_that_was_not_lent_cannot_come_back() -> None:
    with two_ends() as (a, b):
        agree(a, b, MB)
        loan, _ = lend(a, b, b"x" * MB)
        a.memory.came_back(loan.number, 0)
        for number in (loan.number, 10**6):
            with pytest.raises(ProtocolError, match="not lent"):
                a.memory.came_back(number, 0)
            with pytest.raises(ProtocolError, match="not lent"):
                a.memory.heard(Kind.REGION_FREE, pack_region_free([number]))


@pytest.mark.parametrize(
    ("slab", "offset", "size"),
    [(9, 0, MB), (0, -16, MB), (0, 8, MB), (0, 0, 0), (0, 0, -1), (0, 0, 3 * MB), (0, 2 * MB, MB), (0, 2**63, MB)],
)
def test_a_place_outside_of_what_was_offered_is_refused(slab: int, offset: int, size: int) -> None:
    with two_ends() as (a, b):
        agree(a, b, MB)
        offered = a.pool.slabs[0].id
        with pytest.raises(ProtocolError):
            b.memory.region(offered + slab, offset, size, 1)


def test_a_number_is_lent_once_at_a_time() -> None:
    with two_ends() as (a, b):
        agree(a, b, MB)
        offered = a.pool.slabs[0].id
        kept = b.memory.region(offered, 0, 100, 1)
        for number in (0, 1):
            with pytest.raises(ProtocolError, match="lent before"):
                b.memory.region(offered, 4096, 100, number)
        assert len(kept) == 100


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (Kind.SLAB_REPLY, pack_slab_reply(77, True)),
        (Kind.SLAB_UNMAP, pack_slab_unmap(77)),
        (Kind.SLAB_OFFER, pack_slab_offer(77, 4097)),
        (Kind.SLAB_OFFER, b"short"),
        (Kind.REGION_FREE, b"short"),
    ],
)
def test_words_about_what_does_not_exist_are_a_protocol_error(kind: Kind, body: bytes) -> None:
    with two_ends() as (a, _), pytest.raises(ProtocolError):
        a.memory.heard(kind, body)


def test_an_offer_without_memory_behind_it_is_refused_and_does_no_harm(tmp_path: Path) -> None:
    with two_ends() as (a, b):
        a.link.send(Kind.SLAB_OFFER, pack_slab_offer(5, MB), 0, 0, 0)  # without a file descriptor
        plain = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
        assert a.link.offer(pack_slab_offer(6, MB), plain)
        os.close(plain)
        b.read()
        answers = [bytes(frame.body) for frame in a.link.receive()]
        assert answers == [pack_slab_reply(5, False), pack_slab_reply(6, False)]
