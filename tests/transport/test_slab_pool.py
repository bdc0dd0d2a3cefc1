"""The slabs of a worker stay within their limit."""

from __future__ import annotations

import threading

import pytest
from tests.support.shared_memory import MB, ObservedLock, descriptors, mapped, release_all, send, share_slab, two_ends

from telegrad.transport.shared_memory import SharedMemory
from telegrad.transport.slab_pool import Slab
from telegrad.transport.slab_sender import SlabSender


def test_a_lease_that_is_dropped_before_it_was_sent_is_free_again() -> None:
    with two_ends() as (a, b):
        share_slab(a, b, MB)
        offsets = set()
        for _ in range(10):
            lease = a.memory.allocate(MB)
            assert lease is not None
            offsets.add(lease.offset)
        assert len(offsets) <= 2


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
