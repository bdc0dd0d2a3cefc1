"""Messages are packed into one frame, into chunks, or into shared memory."""

from __future__ import annotations

from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.message_stream import Contents, allocate, frames_of

from telegrad.wire.frames import BULK_CHUNK, BULK_HEAD, CHUNK, INLINE_LIMIT, MESSAGE, PREFIX_SIZE
from telegrad.wire.packing import message_size, pack, pack_shared, pack_small


class Region(NamedTuple):
    """A region of shared memory, which may be larger than what is in it."""

    view: memoryview
    slab: int = 0
    offset: int = 0
    number: int = 1


@given(head=st.integers(0, 300), data=st.integers(0, 300), region=st.integers(0, 300))
def test_the_region_starts_at_a_multiple_of_sixteen(head: int, data: int, region: int) -> None:
    (frame,) = frames_of(b"h" * head, b"d" * data, b"r" * region)
    if region:
        assert (len(frame.body) - region) % 16 == 0
        assert len(frame.body) == message_size(b"h" * head, b"d" * data, region)


def test_a_message_above_the_inline_limit_is_split_into_chunks() -> None:
    fits = INLINE_LIMIT - PREFIX_SIZE
    assert [frame.kind for frame in frames_of(b"", b"d" * fits, b"")] == [MESSAGE]
    assert [frame.kind for frame in frames_of(b"", b"d" * (fits + 1), b"")] == [BULK_HEAD, BULK_CHUNK]


@pytest.mark.parametrize("chunks", [(CHUNK, CHUNK), (CHUNK, CHUNK + 1), (CHUNK, CHUNK, CHUNK - 1), (100_000,)])
def test_a_small_remainder_is_added_to_the_last_chunk(chunks: tuple[int, ...]) -> None:
    large = frames_of(b"h", b"", b"r" * sum(chunks))
    assert [len(frame.body) for frame in large] == [PREFIX_SIZE + 1, *chunks]


@given(st.binary(max_size=40), st.binary(max_size=40), st.binary(min_size=1, max_size=40))
def test_copying_and_writing_a_region_give_the_same_frame(head: bytes, data: bytes, region: bytes) -> None:
    (copied,), (written,) = frames_of(head, data, region, copied=True), frames_of(head, data, region)
    assert bytes(copied.body) == bytes(written.body)


@pytest.mark.parametrize("size", [100, 3 * CHUNK])
@pytest.mark.parametrize("copied", [False, True])
def test_packing_takes_a_snapshot(size: int, copied: bool) -> None:
    region = bytearray(b"r" * size)
    frames = pack(b"", b"", Contents(region, copied), allocate)
    region[:] = b"x" * size
    assert all(b"x" not in bytes(frame.body) for frame in frames)


@pytest.mark.parametrize("region", [None, Contents(b"")])
def test_a_message_without_a_region_needs_no_padding(region: Contents | None) -> None:
    assert bytes(pack_small(b"head", b"data", region).body)[PREFIX_SIZE:] == b"headdata"


@given(st.integers(0, 3 * CHUNK))
def test_the_sizes_of_frames_add_up_to_the_message(size: int) -> None:
    frames = frames_of(b"head", b"data", b"r" * size)
    assert sum(frame.size for frame in frames) == sum(len(frame.body) for frame in frames)
    assert size + 8 < sum(frame.size for frame in frames) < size + 80


@given(data=st.integers(0, 300), size=st.integers(1, CHUNK))
def test_the_size_of_a_frame_includes_what_it_refers_to_in_shared_memory(data: int, size: int) -> None:
    frame = pack_shared(b"head", b"d" * data, Contents(b"r" * size), Region(memoryview(bytearray(data + size + 100))))
    assert frame.size == len(frame.body) + data + size
