"""The frame format: the header, the kinds of frames, the limits and the bodies of PING and GOODBYE.

Every frame has a header of 32 bytes::

    magic  version  kind  length of the body  sequence  ack (control lane)  ack (bulk lane)
    2      1        1     4                   8         8                   8

A message is a *head* (a msgspec struct, see `messages`), its pickled *data* and its *region* (the contents of its
tensors, see `tensors`). A small message is one MESSAGE frame. A large one is a BULK_HEAD frame, which announces the
lengths, followed by BULK_CHUNK frames that carry data and region. Small messages may be sent between the chunks.
Between processes on one host, a large message is a single SHARED_MESSAGE frame if possible, with data and region in
shared memory (see `slab_messages`).

`packing` splits messages into frames, `frame_reader` cuts a byte stream into frames, `reassembly` joins frames into
messages.

The two acks are the highest sequence received in each lane. Connections that cannot be resumed do not acknowledge
frames. There, an ack field that is not 0 frees a region of shared memory.

Every length is checked against `Limits` before memory is allocated for it.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from typing import NamedTuple

import msgspec

from telegrad.errors import LimitExceeded, OtherVersion, ProtocolError

MAGIC = b"tg"
VERSION = 10
HEADER = struct.Struct("<2sBBIQQQ")
HEADER_SIZE = HEADER.size
unpack_header = HEADER.unpack_from
PREFIX = struct.Struct("<IIQ")
"""Starts the body of a message: lengths of head, data and region."""
PREFIX_SIZE = PREFIX.size
unpack_prefix = PREFIX.unpack_from
_PING = struct.Struct("<QQ")

INLINE_LIMIT = 64 * 1024
"""Messages up to this size are sent as one frame."""
CHUNK = 512 * 1024
"""Body size of a BULK_CHUNK: small enough that a small message never waits long behind one."""
_REMAINDER = 64 * 1024  # a remainder up to this size is appended to the last whole chunk

MAX_CAUSE = 4096
"""Most bytes of text in a GOODBYE that explain why the worker stopped."""
TRUNCATED_SIZE = 256
"""Bytes kept of a body that does not fit into memory: enough to identify the call."""

CONTROL, BULK = 0, 1
"""The two lanes. Order is preserved only within a lane."""


class Kind(IntEnum):
    """The purpose of a frame."""

    HANDSHAKE = 1  # the only kind that is read before the peer is authenticated
    MESSAGE = 2
    BULK_HEAD = 3
    BULK_CHUNK = 4
    ACK = 5
    PING = 6
    GOODBYE = 7  # an orderly shutdown; the body gives the reason
    SHARED_MESSAGE = 8  # a message in shared memory; the four kinds below manage that memory
    SLAB_OFFER = 9
    SLAB_REPLY = 10
    REGION_FREE = 11
    SLAB_UNMAP = 12


PREAMBLE = 255
"""In place of the kind: this is no frame but the preamble of a TLS connection (see `preamble`)."""

RELAY = 254
"""The same: this is the header of a connection to a relay (see `relay_header`)."""

_LANE = {int(Kind.MESSAGE): CONTROL, int(Kind.BULK_HEAD): BULK, int(Kind.BULK_CHUNK): BULK}
KINDS = frozenset(int(kind) for kind in Kind)
MESSAGE, BULK_HEAD, BULK_CHUNK = int(Kind.MESSAGE), int(Kind.BULK_HEAD), int(Kind.BULK_CHUNK)
SHARED_MESSAGE = int(Kind.SHARED_MESSAGE)
SLAB_KINDS = frozenset(int(kind) for kind in (Kind.SLAB_OFFER, Kind.SLAB_REPLY, Kind.REGION_FREE, Kind.SLAB_UNMAP))


def lane_of(kind: int) -> int:
    """Return the lane in which frames of this kind are numbered."""
    return _LANE.get(kind, CONTROL)


@dataclass(frozen=True)
class Limits:
    """The largest sizes that a peer may announce."""

    frame: int = 64 * 1024 * 1024
    """Body of one frame. Heads get this large only if a message has hundreds of thousands of tensors."""
    message: int = 1 << 36
    """Data and region of one message."""


@dataclass(frozen=True)
class StoredLimits(Limits):
    """Limits of a peer that may send larger frames than are stored: the body of a larger one is read and discarded."""

    stored: int = 1 << 36


HANDSHAKE_LIMITS = Limits(frame=2048, message=0)
"""Limits for a peer that is not authenticated yet."""


class Frame(NamedTuple):
    """One received frame."""

    kind: int
    sequence: int
    ack_control: int
    ack_bulk: int
    body: bytes | bytearray | memoryview


class TruncatedFrame(Frame):
    """A frame whose body was not stored. `body` holds at most its first `TRUNCATED_SIZE` bytes."""


class Message(msgspec.Struct, frozen=True, gc=False):  # a named tuple's fields are slow to read
    """One received message, still encoded."""

    head: memoryview
    data: memoryview
    region: memoryview
    size: int
    """Bytes that came over the link."""
    total: int
    """These, and those in shared memory."""


# The constructor of a named tuple is a Python function, and slower than everything else in reading a small frame.
new_frame: Callable[[tuple[int, int, int, int, bytes | bytearray | memoryview]], Frame]
new_frame = partial(tuple.__new__, Frame)

pack_header: Callable[[int, int, int, int, int], bytes] = partial(HEADER.pack, MAGIC, VERSION)
"""Return the 32 bytes before a body: its kind and length, its sequence, and the two acks."""


def other_version(version: int) -> OtherVersion:
    """Return the error that a frame or preamble of another version of the protocol is."""
    return OtherVersion(
        f"the peer speaks protocol version {version}, this worker speaks {VERSION}: both need the same telegrad"
    )


def check_header(data: bytes | bytearray | memoryview, offset: int, limits: Limits) -> None:
    """Raise ProtocolError if the header is invalid."""
    magic, version, kind, length, *_ = unpack_header(data, offset)
    if magic != MAGIC:
        raise ProtocolError(f"not a telegrad frame: it starts with {bytes(magic)!r}")
    if version != VERSION:
        raise other_version(version)
    if kind == PREAMBLE:
        raise ProtocolError(
            "it is a worker with TLS, and this worker has TLS switched off: start all workers with TLS, or none "
            "(tls=False)"
        )
    if kind not in KINDS:
        raise ProtocolError(f"a frame of unknown kind {kind}")
    if length > limits.frame:
        raise LimitExceeded(f"a frame of {length:,} bytes; the limit is {limits.frame:,}")


def pack_ping(control: int, bulk: int) -> bytes:
    """Return the body of a PING: the highest sequence sent in each lane."""
    return _PING.pack(control, bulk)


def unpack_ping(body: bytes | bytearray | memoryview) -> tuple[int, int]:
    """Return the two sequences in the body of a PING."""
    if len(body) != _PING.size:
        raise ProtocolError(f"a PING of {len(body)} bytes; it must have {_PING.size}")
    control, bulk = _PING.unpack(body)
    return control, bulk


def unpack_goodbye(body: bytes | bytearray | memoryview) -> tuple[tuple[int, int], str]:
    """Return the body of a GOODBYE: the sequences of a PING, and the reason unless the shutdown was orderly."""
    if len(body) > _PING.size + MAX_CAUSE:
        raise LimitExceeded(f"a GOODBYE of {len(body):,} bytes; the limit is {_PING.size + MAX_CAUSE:,}")
    return unpack_ping(body[: _PING.size]), bytes(body[_PING.size :]).decode(errors="replace")


def aligned(size: int) -> int:
    """Round up to a multiple of 16."""
    return (size + 15) & ~15


def next_chunk(remaining: int) -> int:
    """Return the size of the next chunk of a message with `remaining` bytes left."""
    return remaining if remaining <= CHUNK + _REMAINDER else CHUNK
