"""Split outgoing messages into frames (see `frames` for the format).

Packing copies the contents of all tensors, so the sender may change them afterwards. The exception are tensors that
nobody else can change (see `in_place`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple, Protocol

from telegrad.wire.frames import (
    BULK_CHUNK,
    BULK_HEAD,
    INLINE_LIMIT,
    MESSAGE,
    PREFIX,
    PREFIX_SIZE,
    SHARED_MESSAGE,
    aligned,
    next_chunk,
    unpack_prefix,
)
from telegrad.wire.in_place import InPlaceRegion
from telegrad.wire.slab_messages import pack_location


class SharedRegion(Protocol):
    """A region of shared memory that is being filled for a peer."""

    view: memoryview
    slab: int
    offset: int
    number: int


class RegionSource(Protocol):
    """The contents of a message's tensors, before they are copied."""

    size: int

    def write(self, view: memoryview, /) -> None:
        """Copy the contents into `view`."""

    def copy(self) -> bytes | None:
        """Return the contents as bytes, or None if `write` is faster."""


class OutgoingFrame(NamedTuple):
    """One frame to send. The connection adds its sequence and acks."""

    kind: int
    body: bytes | bytearray | memoryview
    shared: Any = None
    """The `SharedRegion` of a SHARED_MESSAGE, as the transport allocated it."""

    @property
    def size(self) -> int:
        """The bytes of the message in this frame, and in shared memory."""
        if self.shared is None:
            return len(self.body)
        lengths: tuple[int, int, int] = unpack_prefix(self.body)
        return len(self.body) + sum(lengths[1:])


# The constructor of a named tuple is a Python function, and slower than everything else in packing a small message.
_new_outgoing: Callable[[tuple[int, bytes | bytearray | memoryview, None]], OutgoingFrame]
_new_outgoing = partial(tuple.__new__, OutgoingFrame)
_pack_prefix = PREFIX.pack
_PADDING = tuple(bytes(size) for size in range(16))


def message_size(head: bytes, data: bytes, region_size: int) -> int:
    """Return the bytes that the message takes on the wire, not counting frame headers."""
    return aligned(PREFIX_SIZE + len(head) + len(data)) + region_size


def pack_small(head: bytes, data: bytes, region: RegionSource | None = None) -> OutgoingFrame:
    """Return one frame with the whole message. The region starts at a multiple of 16."""
    head_size, data_size = len(head), len(data)
    if region is None or not region.size:
        return _new_outgoing((MESSAGE, _pack_prefix(head_size, data_size, 0) + head + data, None))
    prefix = _pack_prefix(head_size, data_size, region.size)
    end = PREFIX_SIZE + head_size + data_size
    contents = region.copy()
    if contents is not None:
        return _new_outgoing((MESSAGE, b"".join((prefix, head, data, _PADDING[-end & 15], contents)), None))
    start = (end + 15) & ~15
    body = bytearray(start + region.size)
    body[:end] = prefix + head + data
    region.write(memoryview(body)[start:])
    return _new_outgoing((MESSAGE, body, None))


def bulk_size(data: bytes, region_size: int) -> int:
    """Return the size of the buffer that `pack_bulk` needs: the padded data and the region."""
    return aligned(len(data)) + region_size


def pack_bulk(head: bytes, data: bytes, region: RegionSource | None, buffer: memoryview) -> Iterator[OutgoingFrame]:
    """Fill `buffer`, which has `bulk_size` bytes, and yield the frames of a large message as slices of it."""
    start = aligned(len(data))
    buffer[: len(data)] = data
    region_size = 0
    if region is not None:
        region_size = region.size
        region.write(buffer[start : start + region_size])
    yield OutgoingFrame(BULK_HEAD, _pack_prefix(len(head), len(data), region_size) + head)
    offset, end = 0, start + region_size
    while offset < end:
        size = next_chunk(end - offset)
        yield OutgoingFrame(BULK_CHUNK, buffer[offset : offset + size])
        offset += size


def pack_in_place(head: bytes, data: bytes, region: InPlaceRegion) -> Iterator[OutgoingFrame]:
    """Yield the frames of a large message, most of which refer to the memory of its tensors."""
    yield OutgoingFrame(BULK_HEAD, _pack_prefix(len(head), len(data), region.size) + head)
    for body in region.chunks(data):
        yield OutgoingFrame(BULK_CHUNK, body)


def pack_shared(head: bytes, data: bytes, region: RegionSource | None, shared: SharedRegion) -> OutgoingFrame:
    """Write region and data, in this order, into shared memory and return the frame that refers to them."""
    memory = shared.view
    region_size = 0
    if region is not None:
        region_size = region.size
        region.write(memory[:region_size])
    memory[region_size : region_size + len(data)] = data
    prefix = _pack_prefix(len(head), len(data), region_size)
    location = pack_location(shared.slab, shared.offset, shared.number)
    return OutgoingFrame(SHARED_MESSAGE, prefix + location + head, shared)


def pack(
    head: bytes, data: bytes, region: RegionSource | None, allocate: Callable[[int], memoryview | SharedRegion]
) -> tuple[OutgoingFrame, ...]:
    """Return the frames of a message, as a snapshot: the sender may change its tensors afterwards."""
    head_size, data_size = len(head), len(data)
    end = PREFIX_SIZE + head_size + data_size
    if region is None and end <= INLINE_LIMIT:
        return (_new_outgoing((MESSAGE, _pack_prefix(head_size, data_size, 0) + head + data, None)),)
    region_size = 0 if region is None else region.size
    if ((end + 15) & ~15) + region_size <= INLINE_LIMIT:
        return (pack_small(head, data, region),)
    if type(region) is InPlaceRegion:
        return tuple(pack_in_place(head, data, region))
    memory = allocate(bulk_size(data, region_size))
    if isinstance(memory, memoryview):
        return tuple(pack_bulk(head, data, region, memory))
    return (pack_shared(head, data, region, memory),)
