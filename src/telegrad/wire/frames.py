"""The frame: what travels on a connection, and how a message is cut into frames and put together again.

Every frame has a header of 32 bytes::

    magic  version  kind  length of the body  sequence  ack (control lane)  ack (bulk lane)
    2      1        1     4                   8         8                   8

A message is a *head* (a msgspec struct, see `messages`), its pickled *data* and its *region* (the contents of its
tensors, see `tensors`). A small message is one MESSAGE frame. A large one is a BULK_HEAD frame, which announces the
lengths, followed by BULK_CHUNK frames that carry data and region; small messages pass between its chunks. Between
processes of one host it is, where possible, one LENT frame, whose data and region are in shared memory (see `lending`).

The two acks are numbers of frames that came, one for each lane. Where connections are not resumable nothing is
acknowledged; there each of the two, if it is not 0, gives back a region of shared memory.

Every length is checked against `Limits` before memory is taken for it.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from typing import Any, NamedTuple, Protocol

from telegrad.errors import LimitExceeded, OtherVersion, ProtocolError
from telegrad.wire.slab_messages import pack_place

MAGIC = b"tg"
VERSION = 5
HEADER = struct.Struct("<2sBBIQQQ")
HEADER_SIZE = HEADER.size
_unpack_header = HEADER.unpack_from
_PREFIX = struct.Struct("<IIQ")  # lengths of head, data and region
PREFIX_SIZE = _PREFIX.size
_pack_prefix, unpack_prefix = _PREFIX.pack, _PREFIX.unpack_from
_SENT = struct.Struct("<QQ")  # the body of a PING

INLINE_LIMIT = 64 * 1024
"""Messages up to this size travel as one frame."""
CHUNK = 512 * 1024
"""Body size of a BULK_CHUNK: small enough that a small message never waits long behind one."""
_REMAINDER = 64 * 1024  # what is left after the last whole chunk, if it is no more than this, is added to that one

MAX_CAUSE = 4096
"""Bytes in which a GOODBYE says why its worker ended."""
BEGINNING = 256
"""Bytes that are kept of a body for which there is no memory: they name the call."""

CONTROL, BULK = 0, 1
"""The two lanes. Order is kept inside a lane only."""


class Kind(IntEnum):
    """What a frame is for."""

    HANDSHAKE = 1  # before the peer has proved itself, the only kind that is read
    MESSAGE = 2
    BULK_HEAD = 3
    BULK_CHUNK = 4
    ACK = 5
    PING = 6
    GOODBYE = 7  # an orderly end; the body says why
    LENT = 8  # a message in shared memory; the four others see to that memory
    OFFER = 9
    ANSWER = 10
    RETURN = 11
    FORGET = 12


_LANE = {int(Kind.MESSAGE): CONTROL, int(Kind.BULK_HEAD): BULK, int(Kind.BULK_CHUNK): BULK}
_KINDS = frozenset(int(kind) for kind in Kind)
MESSAGE, BULK_HEAD, BULK_CHUNK, LENT = int(Kind.MESSAGE), int(Kind.BULK_HEAD), int(Kind.BULK_CHUNK), int(Kind.LENT)
ABOUT_SLABS = frozenset(int(kind) for kind in (Kind.OFFER, Kind.ANSWER, Kind.RETURN, Kind.FORGET))


def lane_of(kind: int) -> int:
    """The lane that frames of this kind are counted in."""
    return _LANE.get(kind, CONTROL)


@dataclass(frozen=True)
class Limits:
    """The most that a peer may announce."""

    frame: int = 64 * 1024 * 1024
    """Body of one frame. Heads are this large only when a message has hundreds of thousands of tensors."""
    message: int = 1 << 36
    """Data and region of one message."""


HANDSHAKE_LIMITS = Limits(frame=2048, message=0)
"""What a stranger may make us read."""


class Frame(NamedTuple):
    """One frame as it arrived."""

    kind: int
    sequence: int
    ack_control: int
    ack_bulk: int
    body: bytes | bytearray | memoryview


class CutFrame(Frame):
    """A frame for whose body there was no memory, or no use: `body` is at most the beginning of it."""


class Message(NamedTuple):
    """One message as it arrived, still encoded."""

    head: memoryview
    data: memoryview
    region: memoryview
    size: int


class Loan(Protocol):
    """A region of shared memory that is being filled for a peer."""

    view: memoryview
    slab: int
    offset: int
    number: int


class Region(Protocol):
    """The contents of a message's tensors, before they are copied."""

    size: int

    def write(self, view: memoryview, /) -> None:
        """Copy them to where they belong."""

    def copy(self) -> bytes | None:
        """The same as bytes, if that is the faster way."""


class Outgoing(NamedTuple):
    """One frame to send, still without sequence and acks."""

    kind: int
    body: bytes | bytearray | memoryview
    loan: Any = None
    """The region that the frame hands over, as its lender gave it out."""


# The constructors of named tuples are Python functions, which take longer than all else that makes a small message.
_new_frame: Callable[[tuple[int, int, int, int, bytes | bytearray | memoryview]], Frame]
_new_frame = partial(tuple.__new__, Frame)
_new_outgoing: Callable[[tuple[int, bytes | bytearray | memoryview, None]], Outgoing]
_new_outgoing = partial(tuple.__new__, Outgoing)


pack_header: Callable[[int, int, int, int, int], bytes] = partial(HEADER.pack, MAGIC, VERSION)
"""The 32 bytes before a body: its kind and length, its sequence, and the two acks."""


def pack_sent(control: int, bulk: int) -> bytes:
    """The body of a PING: the highest sequence sent in each lane."""
    return _SENT.pack(control, bulk)


def unpack_sent(body: bytes | bytearray | memoryview) -> tuple[int, int]:
    """Read the body of a PING."""
    if len(body) != _SENT.size:
        raise ProtocolError(f"a PING of {len(body)} bytes; it has {_SENT.size}")
    control, bulk = _SENT.unpack(body)
    return control, bulk


def unpack_goodbye(body: bytes | bytearray | memoryview) -> tuple[tuple[int, int], str]:
    """Read the body of a GOODBYE: that of a PING, and why the worker ended, if it did not leave in order."""
    if len(body) > _SENT.size + MAX_CAUSE:
        raise LimitExceeded(f"a GOODBYE of {len(body):,} bytes; the limit is {_SENT.size + MAX_CAUSE:,}")
    return unpack_sent(body[: _SENT.size]), bytes(body[_SENT.size :]).decode(errors="replace")


# -- messages out ---------------------------------------------------------------------------------------------


_PADDING = tuple(bytes(size) for size in range(16))


def aligned(size: int) -> int:
    """The next multiple of 16."""
    return (size + 15) & ~15


def message_size(head: bytes, data: bytes, region_size: int) -> int:
    """Bytes that the message will take on the wire, not counting frame headers."""
    return aligned(PREFIX_SIZE + len(head) + len(data)) + region_size


def pack_small(head: bytes, data: bytes, region: Region | None = None) -> Outgoing:
    """One frame for the whole message. The region starts at a multiple of 16."""
    if region is None or not region.size:
        return _new_outgoing((MESSAGE, _pack_prefix(len(head), len(data), 0) + head + data, None))
    prefix = _pack_prefix(len(head), len(data), region.size)
    end = PREFIX_SIZE + len(head) + len(data)
    contents = region.copy()
    if contents is not None:
        return _new_outgoing((MESSAGE, b"".join((prefix, head, data, _PADDING[-end & 15], contents)), None))
    start = (end + 15) & ~15
    body = bytearray(start + region.size)
    body[:end] = prefix + head + data
    region.write(memoryview(body)[start:])
    return _new_outgoing((MESSAGE, body, None))


def bulk_size(data: bytes, region_size: int) -> int:
    """Bytes of the buffer that `pack_bulk` cuts into chunks: the data, padded, and the region."""
    return aligned(len(data)) + region_size


def pack_bulk(head: bytes, data: bytes, region: Region | None, buffer: memoryview) -> Iterator[Outgoing]:
    """The frames of a large message, over `buffer`, which has `bulk_size` bytes and is filled here (the snapshot)."""
    start = aligned(len(data))
    buffer[: len(data)] = data
    region_size = 0
    if region is not None:
        region_size = region.size
        region.write(buffer[start : start + region_size])
    yield Outgoing(BULK_HEAD, _PREFIX.pack(len(head), len(data), region_size) + head)
    offset, end = 0, start + region_size
    while offset < end:
        size = next_chunk(end - offset)
        yield Outgoing(BULK_CHUNK, buffer[offset : offset + size])
        offset += size


def next_chunk(rest: int) -> int:
    """The size of the next chunk, where `rest` bytes are left."""
    return rest if rest <= CHUNK + _REMAINDER else CHUNK


def pack_lent(head: bytes, data: bytes, region: Region | None, loan: Loan) -> Outgoing:
    """The one frame of a message whose region and data, in this order, are put into shared memory here."""
    memory = loan.view
    region_size = 0
    if region is not None:
        region_size = region.size
        region.write(memory[:region_size])
    memory[region_size : region_size + len(data)] = data
    prefix = _PREFIX.pack(len(head), len(data), region_size)
    return Outgoing(LENT, prefix + pack_place(loan.slab, loan.offset, loan.number) + head, loan)


def pack(
    head: bytes, data: bytes, region: Region | None, allocate: Callable[[int], memoryview | Loan]
) -> tuple[Outgoing, ...]:
    """The frames of a message. What is in them is a snapshot: the sender may change its tensors now."""
    if region is None and PREFIX_SIZE + len(head) + len(data) <= INLINE_LIMIT:
        return (_new_outgoing((MESSAGE, _pack_prefix(len(head), len(data), 0) + head + data, None)),)
    region_size = 0 if region is None else region.size
    if ((PREFIX_SIZE + len(head) + len(data) + 15) & ~15) + region_size <= INLINE_LIMIT:
        return (pack_small(head, data, region),)
    room = allocate(bulk_size(data, region_size))
    if isinstance(room, memoryview):
        return tuple(pack_bulk(head, data, region, room))
    return (pack_lent(head, data, region, room),)


# -- frames in ------------------------------------------------------------------------------------------------


def check_header(data: bytes | bytearray | memoryview, offset: int, limits: Limits) -> None:
    """Read a header. What is wrong with it is a ProtocolError."""
    magic, version, kind, length, *_ = _unpack_header(data, offset)
    if magic != MAGIC:
        raise ProtocolError(f"not a telegrad frame: it starts with {bytes(magic)!r}")
    if version != VERSION:
        raise OtherVersion(
            f"the peer speaks protocol version {version}, this worker speaks {VERSION}: both need the same telegrad"
        )
    if kind not in _KINDS:
        raise ProtocolError(f"a frame of unknown kind {kind}")
    if length > limits.frame:
        raise LimitExceeded(f"a frame of {length:,} bytes; the limit is {limits.frame:,}")


_NOTHING = bytearray()


def _room_for(length: int) -> bytearray | None:
    """Memory for a body; None: there is none, and the body is read and not kept, or the stream would end here."""
    try:
        return bytearray(length)
    except MemoryError:
        return None


class FrameReader:
    """Cuts a stream of bytes into frames.

    Use: read into `buffer()`, then tell `advance` how many bytes came and take the frames that it yields, each of
    them before the next: where a chunk belongs depends on the frames before it. `place` says where the body of a
    chunk with this sequence and length goes, or None to read and discard it. A body that is discarded, or for which
    there is no memory, makes a `CutFrame`.

    A MemoryError leaves the reader as it was before the frame, and `unfinished`: nothing of the stream is lost.
    """

    SCRATCH = 128 * 1024
    UNPROVED = 2 * (HEADER_SIZE + HANDSHAKE_LIMITS.frame)  # all that is read at once, and held, for a stranger
    BETWEEN_CHUNKS = 4096  # little: what is read past a chunk's header here has to be moved once more

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.place: Callable[[int, int], memoryview | None] = lambda sequence, length: None
        self.only_handshake = True
        """Until the peer has proved itself, a frame of any other kind is an error."""
        self._scratch = bytearray(self.UNPROVED)
        self._view = memoryview(self._scratch)
        self._start = self._end = 0
        self._body: memoryview | bytearray = _NOTHING  # of the frame that _rest belongs to
        self._rest: memoryview | None = None
        self._skip = 0  # bytes of a body that are still to be read, and not kept
        self._header = (0, 0, 0, 0)
        self._room = self.SCRATCH
        self.unfinished = False
        """Whoever took frames from `advance` stopped before the last: there may be more without reading."""

    def admit(self, limits: Limits, place: Callable[[int, int], memoryview | None]) -> None:
        """The peer has proved itself. Not while frames are being taken from `advance`, unless that is given up."""
        self.limits, self.place, self.only_handshake = limits, place, False
        try:
            scratch = bytearray(self.SCRATCH)
        except MemoryError:
            return  # the small one will do
        self._end -= self._start
        scratch[: self._end] = self._view[self._start : self._start + self._end]
        self._start = 0
        self._scratch, self._view = scratch, memoryview(scratch)

    def buffer(self) -> memoryview:
        """Where the next bytes of the stream go."""
        if self._rest is not None:
            return self._rest
        if self._skip:
            return self._view[: self._skip]
        end, room = self._end, self._room
        return self._view[end : end + room] if end or room < self.SCRATCH else self._view

    def only(self, count: int) -> Frame | None:
        """The frame, if the `count` bytes that came are one small message and nothing else; then they are done with.

        If not, None, and it is for `advance` to say what they are. Most reads find one message.
        """
        if self._end or count < HEADER_SIZE or self.only_handshake or self._rest is not None:
            return None
        scratch = self._scratch
        magic, version, kind, length, sequence, ack_control, ack_bulk = _unpack_header(scratch, 0)
        if (kind != MESSAGE and kind != LENT) or length + HEADER_SIZE != count or length > self.limits.frame:
            return None
        if magic != MAGIC or version != VERSION:
            return None
        self._room = self.SCRATCH
        try:
            return _new_frame((kind, sequence, ack_control, ack_bulk, scratch[HEADER_SIZE:count]))
        except MemoryError:
            self._end, self.unfinished = count, True  # nothing is lost: `advance` tries again
            raise

    def advance(self, count: int) -> Iterator[Frame]:
        """Take note of `count` bytes that were written into `buffer()`, and yield the frames that are complete."""
        if self._rest is not None:
            if count < len(self._rest):
                self._rest = self._rest[count:]
                return
            self._rest, self._room = None, self.BETWEEN_CHUNKS
            whole, self._body = self._body, _NOTHING  # or the memory of a message would live until the next comes
            yield Frame(*self._header, whole)
            return
        if self._skip:
            self._skip -= count
            wanted = min(count, BEGINNING - len(self._body))
            if wanted > 0 and self._header[0] != BULK_CHUNK:
                self._body = bytearray(self._body) + self._view[:wanted]
            if not self._skip:
                beginning, self._body = self._body, _NOTHING
                yield CutFrame(*self._header, beginning)
            return
        self._end += count
        self.unfinished = True
        self._room = self.SCRATCH
        scratch = self._scratch
        if self.only_handshake and not MAGIC.startswith(first := bytes(scratch[self._start : self._end][: len(MAGIC)])):
            # Said at once: somebody who speaks another protocol may wait for our answer before a header is full.
            raise ProtocolError(f"not a telegrad frame: it starts with {first!r}")
        while self._end - self._start >= HEADER_SIZE:
            start, end = self._start, self._end
            magic, version, kind, length, sequence, ack_control, ack_bulk = _unpack_header(scratch, start)
            if magic != MAGIC or version != VERSION or kind not in _KINDS or length > self.limits.frame:
                check_header(scratch, start, self.limits)  # says which
            if self.only_handshake and kind != Kind.HANDSHAKE:
                raise ProtocolError(f"a frame of kind {kind} before the handshake")
            body_start = start + HEADER_SIZE
            available = end - body_start
            body: memoryview | bytearray | None
            if kind == BULK_CHUNK:
                body = self.place(sequence, length)
            elif available >= length:
                frame = _new_frame((kind, sequence, ack_control, ack_bulk, scratch[body_start : body_start + length]))
                self._start = body_start + length  # not before: if there is no memory, `advance` tries again
                yield frame
                continue
            elif length + HEADER_SIZE <= len(scratch) // 2:
                break  # the rest comes into scratch
            else:
                body = _room_for(length)
            got = min(available, length)
            if body is None:
                self._header = (kind, sequence, ack_control, ack_bulk)
                self._body = scratch[body_start : body_start + min(got, BEGINNING)]
                self._start = body_start + got
                if got < length:
                    self._skip = length - got
                    break
                beginning, self._body = self._body, _NOTHING
                yield CutFrame(*self._header, beginning)
                continue
            body[:got] = self._view[body_start : body_start + got]
            self._start = body_start + got
            if got < length:
                self._header, self._body = (kind, sequence, ack_control, ack_bulk), body
                self._rest = memoryview(body)[got:]
                break
            yield Frame(kind, sequence, ack_control, ack_bulk, body)
        start, end = self._start, self._end
        if start == end:
            self._start = self._end = 0
        elif start > len(scratch) // 2 or end == len(scratch):
            scratch[: end - start] = scratch[start:end]
            self._start, self._end = 0, end - start
        self.unfinished = False
