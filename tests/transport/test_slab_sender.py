"""A region is reused only after the peer has released it, and one offer is open at a time."""

from __future__ import annotations

import pytest
from tests.support.shared_memory import MB, mapped, meanwhile, send, share_slab, two_ends

from telegrad.errors import ProtocolError
from telegrad.transport import slab_sender
from telegrad.wire.frames import Kind
from telegrad.wire.slab_messages import pack_region_free


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


def test_nothing_is_shared_if_the_system_refuses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(size: int) -> int:
        raise PermissionError("memfd_create is not permitted here")

    monkeypatch.setattr(slab_sender, "make_memory", refuse)
    with two_ends() as (a, b):
        for _ in range(3):
            assert a.memory.allocate(MB) is None
            assert b.read() == []
        assert a.pool.total == 0


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


def test_releasing_a_region_that_is_not_in_use_is_a_protocol_error() -> None:
    with two_ends() as (a, b):
        share_slab(a, b, MB)
        lease, _ = send(a, b, b"x" * MB)
        a.memory.apply_releases(lease.number, 0)
        for number in (lease.number, 10**6):
            with pytest.raises(ProtocolError, match="not in use"):
                a.memory.apply_releases(number, 0)
            with pytest.raises(ProtocolError, match="not in use"):
                a.memory.handle_frame(Kind.REGION_FREE, pack_region_free([number]))
