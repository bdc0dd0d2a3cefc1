"""Messages about shared memory round-trip, and invalid ones are refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from telegrad.errors import ProtocolError
from telegrad.wire import slab_messages as slabs
from telegrad.wire.frames import SHARED_MESSAGE, Frame, Limits
from telegrad.wire.packing import OutgoingFrame, pack
from telegrad.wire.reassembly import Assembler

numbers = st.integers(0, 2**64 - 1)


class PlainRegion:
    """A region of plain memory in place of shared memory."""

    def __init__(self, size: int) -> None:
        self.view = memoryview(bytearray(size))
        self.slab, self.offset, self.number = 7, 4096, 99


class Contents:
    def __init__(self, contents: bytes) -> None:
        self._contents = contents
        self.size = len(contents)

    def write(self, memory: memoryview) -> None:
        memory[:] = self._contents

    def copy(self) -> bytes | None:
        return None


def pack_shared(head: bytes, data: bytes, region: bytes) -> tuple[OutgoingFrame, PlainRegion]:
    regions: list[PlainRegion] = []

    def allocate(size: int) -> PlainRegion:
        regions.append(PlainRegion(size))
        return regions[0]

    (frame,) = pack(head, data, Contents(region) if region else None, allocate)
    return frame, regions[0]


@given(numbers, st.integers(1, 2**50), st.booleans(), st.lists(numbers))
def test_every_body_round_trips(slab: int, pages: int, accepted: bool, freed: list[int]) -> None:
    size = pages * slabs.PAGE
    assert slabs.unpack_slab_offer(slabs.pack_slab_offer(slab, size)) == (slab, size)
    assert slabs.unpack_slab_reply(slabs.pack_slab_reply(slab, accepted)) == (slab, accepted)
    assert slabs.unpack_slab_unmap(slabs.pack_slab_unmap(slab)) == slab
    assert slabs.unpack_region_free(slabs.pack_region_free(freed)) == tuple(freed)
    assert slabs.unpack_location(b"before" + slabs.pack_location(slab, size, 5), 6) == (slab, size, 5)


@given(st.binary(max_size=64))
def test_random_bytes_raise_only_protocol_errors(body: bytes) -> None:
    for read in (slabs.unpack_slab_offer, slabs.unpack_slab_reply, slabs.unpack_slab_unmap, slabs.unpack_region_free):
        try:
            read(body)
        except ProtocolError:
            continue


@pytest.mark.parametrize("size", [0, 1, slabs.PAGE + 1])
def test_a_slab_must_consist_of_whole_pages(size: int) -> None:
    with pytest.raises(ProtocolError, match="whole pages"):
        slabs.unpack_slab_offer(slabs.pack_slab_offer(1, size))


@pytest.mark.parametrize(("data", "region"), [(100, 200_000), (0, 65_536), (200_000, 0), (70_001, 80_016)])
def test_a_message_in_shared_memory_round_trips(data: int, region: int) -> None:
    frame, shared = pack_shared(b"the head", b"d" * data, b"r" * region)
    assert frame.kind == SHARED_MESSAGE
    assert frame.shared is shared
    opened: list[tuple[int, int, int, int]] = []

    def open_region(slab: int, offset: int, size: int, number: int) -> memoryview:
        opened.append((slab, offset, size, number))
        return shared.view[:size]

    assembler = Assembler(Limits(), lambda size: pytest.fail("nothing may be allocated"))
    assembler.open_region = open_region
    message = assembler.read(Frame(SHARED_MESSAGE, 1, 0, 0, frame.body))
    assert message is not None
    assert (bytes(message.head), bytes(message.data), bytes(message.region)) == (
        b"the head",
        b"d" * data,
        b"r" * region,
    )
    assert opened == [(7, 4096, data + region, 99)]
    assert message.size == len(frame.body), "both sides count the same bytes against the credits"


def test_shared_memory_is_refused_on_a_connection_without_it() -> None:
    frame, _ = pack_shared(b"h", b"", b"r" * 100_000)
    with pytest.raises(ProtocolError, match="without shared memory"):
        Assembler(Limits(), bytearray).read(Frame(SHARED_MESSAGE, 1, 0, 0, frame.body))  # type: ignore[arg-type]  # never called


@pytest.mark.parametrize("change", [lambda b: b[:-1], lambda b: b + b"x", lambda b: b[:10], lambda b: b[:30]])
def test_inconsistent_lengths_raise_a_protocol_error(change: object) -> None:
    frame, shared = pack_shared(b"the head", b"", b"r" * 100_000)
    assembler = Assembler(Limits(), bytearray)  # type: ignore[arg-type]  # never called
    assembler.open_region = lambda slab, offset, size, number: shared.view[:size]
    with pytest.raises(ProtocolError):
        assembler.read(Frame(SHARED_MESSAGE, 1, 0, 0, change(frame.body)))  # type: ignore[operator]  # one of the above
