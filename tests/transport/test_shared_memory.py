"""Releases and the other frames about shared memory, in both directions of a connection."""

from __future__ import annotations

import threading

import pytest
from tests.support.shared_memory import MB, descriptors, mapped, release_all, send, share_slab, two_ends

from telegrad.errors import ProtocolError
from telegrad.wire.frames import Kind
from telegrad.wire.slab_messages import pack_slab_offer, pack_slab_reply, pack_slab_unmap


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
def test_invalid_frames_about_slabs_are_protocol_errors(kind: Kind, body: bytes) -> None:
    with two_ends() as (a, _), pytest.raises(ProtocolError):
        a.memory.handle_frame(kind, body)
