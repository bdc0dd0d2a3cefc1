"""What two workers of one host say about memory that they share.

A *slab* is a block of memory that one worker made and both can see. Its maker lends *regions* of it: each carries the
contents of one message, belongs to the receiver from then on, and comes back when nothing there refers to it. All of
these frames travel in the control lane, in this order of events::

    lender                                        borrower
      OFFER  slab, size; with a file descriptor  →
                                                 ←  ANSWER  slab, whether it could be mapped
      LENT   a message, and where its contents are →
                                                 ←  RETURN  numbers of regions (most ride on other frames)
      FORGET slab; none of its regions is out    →

Nothing is lent of a slab before the answer, so whatever cannot be shared simply goes through the socket.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable

from telegrad.errors import ProtocolError

PAGE = 4096
"""Slabs have whole pages."""

_OFFER = struct.Struct("<QQ")
_ANSWER = struct.Struct("<Q?")
_FORGET = struct.Struct("<Q")
_PLACE = struct.Struct("<QQQ")
PLACE_SIZE = _PLACE.size

Body = bytes | bytearray | memoryview


def pack_offer(slab: int, size: int) -> bytes:
    """The body of an OFFER."""
    return _OFFER.pack(slab, size)


def unpack_offer(body: Body) -> tuple[int, int]:
    """Slab and size of an OFFER."""
    slab, size = _unpack(_OFFER, body, "OFFER")
    if size < 1 or size % PAGE:
        raise ProtocolError(f"a slab of {size:,} bytes is offered; slabs have whole pages of {PAGE} bytes")
    return slab, size


def pack_answer(slab: int, accepted: bool) -> bytes:
    """The body of an ANSWER."""
    return _ANSWER.pack(slab, accepted)


def unpack_answer(body: Body) -> tuple[int, bool]:
    """Slab of an ANSWER, and whether it was accepted."""
    slab, accepted = _unpack(_ANSWER, body, "ANSWER")
    return slab, bool(accepted)


def pack_forget(slab: int) -> bytes:
    """The body of a FORGET."""
    return _FORGET.pack(slab)


def unpack_forget(body: Body) -> int:
    """The slab of a FORGET."""
    return _unpack(_FORGET, body, "FORGET")[0]


def pack_return(numbers: Iterable[int]) -> bytes:
    """The body of a RETURN."""
    listed = tuple(numbers)
    return struct.pack(f"<{len(listed)}Q", *listed)


def unpack_return(body: Body) -> tuple[int, ...]:
    """The numbers of the regions that come back with a RETURN."""
    if len(body) % 8:
        raise ProtocolError(f"a RETURN of {len(body)} bytes; each number has 8")
    return struct.unpack(f"<{len(body) // 8}Q", body)


def pack_place(slab: int, offset: int, number: int) -> bytes:
    """Where the contents of a LENT message are, and the number under which the region comes back."""
    return _PLACE.pack(slab, offset, number)


def unpack_place(body: Body, at: int) -> tuple[int, int, int]:
    """Slab, offset and number of the region of a LENT message."""
    slab, offset, number = _PLACE.unpack_from(body, at)
    return slab, offset, number


def _unpack(form: struct.Struct, body: Body, kind: str) -> tuple[int, ...]:
    if len(body) != form.size:
        raise ProtocolError(f"a frame of kind {kind} has {form.size} bytes, not {len(body)}")
    return form.unpack(body)
