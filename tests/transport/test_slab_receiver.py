"""Regions live as long as something refers to them, and a peer cannot make this worker read other memory."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tests.support.shared_memory import MB, mapped, send, share_slab, two_ends

from telegrad.errors import ProtocolError
from telegrad.wire.frames import Kind
from telegrad.wire.slab_messages import pack_slab_offer, pack_slab_reply


def test_the_receiver_sees_what_the_sender_writes_without_a_copy() -> None:
    with two_ends() as (a, b):
        share_slab(a, b, MB)
        lease, tensor = send(a, b, b"x" * MB)
        assert bool((tensor == ord("x")).all())
        lease.view[0] = ord("y")  # telegrad never does this
        assert int(tensor[0]) == ord("y")


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


def test_an_offer_without_sealed_memory_is_refused(tmp_path: Path) -> None:
    with two_ends() as (a, b):
        a.link.send(Kind.SLAB_OFFER, pack_slab_offer(5, MB), 0, 0, 0)  # without a file descriptor
        plain = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
        assert a.link.offer(pack_slab_offer(6, MB), plain)
        os.close(plain)
        b.read()
        answers = [bytes(frame.body) for frame in a.link.receive()]
        assert answers == [pack_slab_reply(5, False), pack_slab_reply(6, False)]
