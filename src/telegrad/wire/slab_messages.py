"""Frame bodies with which two workers on one host manage shared memory.

A *slab* is a block of memory that one worker created and both have mapped. Its owner fills *regions* of it: each
carries the contents of one message, then belongs to the receiver, and is freed when the receiver has no more references
to it. All of these frames travel in the control lane, in this order::

    owner                                                   receiver
      SLAB_OFFER      slab, size; with a file descriptor  →
                                                          ←  SLAB_REPLY   slab, whether it could be mapped
      SHARED_MESSAGE  a message and the region of its contents →
                                                          ←  REGION_FREE  numbers of regions (most ride on other frames)
      SLAB_UNMAP      slab; none of its regions is in use →

The owner uses a slab only after the reply. Until then, or if the slab cannot be mapped, messages go through the socket.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable

from telegrad.errors import ProtocolError

PAGE = 4096
"""Slabs consist of whole pages."""

_SLAB_OFFER = struct.Struct("<QQ")
_SLAB_REPLY = struct.Struct("<Q?")
_SLAB_UNMAP = struct.Struct("<Q")
_LOCATION = struct.Struct("<QQQ")
LOCATION_SIZE = _LOCATION.size

Body = bytes | bytearray | memoryview


def pack_slab_offer(slab: int, size: int) -> bytes:
    """Return the body of a SLAB_OFFER."""
    return _SLAB_OFFER.pack(slab, size)


def unpack_slab_offer(body: Body) -> tuple[int, int]:
    """Return the slab and size of a SLAB_OFFER."""
    slab, size = _unpack(_SLAB_OFFER, body, "SLAB_OFFER")
    if size < 1 or size % PAGE:
        raise ProtocolError(f"a peer offers a slab of {size:,} bytes; slabs consist of whole pages of {PAGE} bytes")
    return slab, size


def pack_slab_reply(slab: int, accepted: bool) -> bytes:
    """Return the body of a SLAB_REPLY."""
    return _SLAB_REPLY.pack(slab, accepted)


def unpack_slab_reply(body: Body) -> tuple[int, bool]:
    """Return the slab of a SLAB_REPLY, and whether it was mapped."""
    slab, accepted = _unpack(_SLAB_REPLY, body, "SLAB_REPLY")
    return slab, bool(accepted)


def pack_slab_unmap(slab: int) -> bytes:
    """Return the body of a SLAB_UNMAP."""
    return _SLAB_UNMAP.pack(slab)


def unpack_slab_unmap(body: Body) -> int:
    """Return the slab of a SLAB_UNMAP."""
    return _unpack(_SLAB_UNMAP, body, "SLAB_UNMAP")[0]


def pack_region_free(numbers: Iterable[int]) -> bytes:
    """Return the body of a REGION_FREE."""
    values = tuple(numbers)
    return struct.pack(f"<{len(values)}Q", *values)


def unpack_region_free(body: Body) -> tuple[int, ...]:
    """Return the numbers of the regions that a REGION_FREE frees."""
    if len(body) % 8:
        raise ProtocolError(f"a REGION_FREE of {len(body)} bytes; each number takes 8")
    return struct.unpack(f"<{len(body) // 8}Q", body)


def pack_location(slab: int, offset: int, number: int) -> bytes:
    """Return the location of a SHARED_MESSAGE's contents, and the number with which the region is freed."""
    return _LOCATION.pack(slab, offset, number)


def unpack_location(body: Body, at: int) -> tuple[int, int, int]:
    """Return slab, offset and number of the region of a SHARED_MESSAGE."""
    slab, offset, number = _LOCATION.unpack_from(body, at)
    return slab, offset, number


def _unpack(form: struct.Struct, body: Body, kind: str) -> tuple[int, ...]:
    if len(body) != form.size:
        raise ProtocolError(f"a {kind} of {len(body)} bytes; it must have {form.size}")
    return form.unpack(body)
