"""Cut the byte stream of a connection into frames."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from telegrad.errors import ProtocolError
from telegrad.wire.frames import (
    BULK_CHUNK,
    HANDSHAKE_LIMITS,
    HEADER_SIZE,
    KINDS,
    MAGIC,
    MESSAGE,
    SHARED_MESSAGE,
    TRUNCATED_SIZE,
    VERSION,
    Frame,
    Kind,
    Limits,
    StoredLimits,
    TruncatedFrame,
    check_header,
    new_frame,
    unpack_header,
)

_NOTHING = bytearray()
_SMALL_READS = 16  # in a row, after which the memory for larger ones is given back


def _allocate_body(length: int) -> bytearray | None:
    """Return memory for a body, or None if there is none: the body is then read and discarded."""
    try:
        return bytearray(length)
    except MemoryError:
        return None


class FrameReader:
    """Cuts a stream of bytes into frames.

    Read into `buffer()`, then pass the number of bytes to `advance` and handle each frame that it yields before taking
    the next one: the destination of a chunk depends on the frames before it. `destination` returns the buffer for the
    body of a chunk with a given sequence and length, or None to discard the body. A discarded body, or one that does
    not fit into memory, makes a `TruncatedFrame`.

    A MemoryError leaves the reader as it was before the frame, and `unfinished`: no bytes of the stream are lost.

    While frames come that fit into `LARGE` and not into `SCRATCH`, so much memory is kept: each then takes one read
    instead of three. Larger ones are read into memory of their own.
    """

    SCRATCH = 2 * (HEADER_SIZE + HANDSHAKE_LIMITS.frame)  # all memory for an unauthenticated peer, and an idle link
    LARGE = SCRATCH + 16 * 1024
    BETWEEN_CHUNKS = 4096  # small: bytes read past the header of the next chunk have to be copied once more

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._most_stored = limits.frame
        self.destination: Callable[[int, int], memoryview | None] = lambda sequence, length: None
        self.only_handshake = True
        """Until the peer is authenticated, any other kind of frame is an error."""
        self._scratch = bytearray(self.SCRATCH)
        self._view = memoryview(self._scratch)
        self._start = self._end = 0
        self._body: memoryview | bytearray = _NOTHING  # of the frame that _rest belongs to
        self._rest: memoryview | None = None
        self._skip = 0  # bytes of a discarded body that are still to be read
        self._header = (0, 0, 0, 0)
        self._room = 0  # most bytes to read; 0: as many as scratch has room for
        self._large = 0  # reads in a row that did not need a large scratch, plus 1; 0: scratch is small
        self.unfinished = False
        """`advance` was stopped before its last frame: more frames may be available without reading."""

    def admit(self, limits: Limits, destination: Callable[[int, int], memoryview | None]) -> None:
        """Accept all frames from now on: the peer is authenticated. Not while `advance` is being iterated."""
        self.limits, self.destination, self.only_handshake = limits, destination, False
        self._most_stored = limits.stored if isinstance(limits, StoredLimits) else limits.frame

    def buffer(self) -> memoryview:
        """Return the buffer for the next bytes of the stream."""
        if self._rest is not None:
            return self._rest
        if self._skip:
            return self._view[: self._skip]
        end, room = self._end, self._room
        if room:
            return self._view[end : end + room]
        return self._view[end:] if end else self._view

    def take_single(self, count: int) -> Frame | None:
        """Return the frame and consume it, if the `count` bytes just read are exactly one small message.

        Otherwise return None without consuming anything: pass `count` to `advance`. Most reads return one message.
        """
        if self._end or count < HEADER_SIZE or self.only_handshake or self._rest is not None or self._skip:
            return None
        scratch = self._scratch
        magic, version, kind, length, sequence, ack_control, ack_bulk = unpack_header(scratch, 0)
        if (kind != MESSAGE and kind != SHARED_MESSAGE) or length + HEADER_SIZE != count or length > self.limits.frame:
            return None
        if magic != MAGIC or version != VERSION:
            return None
        self._room = 0
        try:
            frame = new_frame((kind, sequence, ack_control, ack_bulk, scratch[HEADER_SIZE:count]))
        except MemoryError:
            self._end, self.unfinished = count, True  # no bytes are lost: `advance` tries again
            raise
        if self._large:
            self._large = self._large + 1 if count <= self.SCRATCH else 1
            if self._large > _SMALL_READS:
                self._resize(self.SCRATCH)
        return frame

    def _resize(self, size: int) -> None:
        """Replace scratch, which is empty."""
        try:
            scratch = bytearray(size)
        except MemoryError:
            return  # the one that is there will do
        self._scratch, self._view, self._large = scratch, memoryview(scratch), int(size > self.SCRATCH)

    def advance(self, count: int) -> Iterator[Frame]:
        """Process `count` bytes that were written into `buffer()`, and yield the completed frames."""
        if self._rest is not None:
            if count < len(self._rest):
                self._rest = self._rest[count:]
                return
            self._rest, self._room = None, self.BETWEEN_CHUNKS if self._header[0] == BULK_CHUNK else 0
            if not (self._room or self._large or self._end) and len(self._body) <= self.LARGE - HEADER_SIZE:
                self._resize(self.LARGE)
            whole, self._body = self._body, _NOTHING  # or the memory of a message would live until the next one arrives
            yield Frame(*self._header, whole)
            return
        if self._skip:
            self._skip -= count
            wanted = min(count, TRUNCATED_SIZE - len(self._body))
            if wanted > 0 and self._header[0] != BULK_CHUNK:
                self._body = bytearray(self._body) + self._view[:wanted]
            if not self._skip:
                truncated, self._body = self._body, _NOTHING
                yield TruncatedFrame(*self._header, truncated)
            return
        self._end += count
        self.unfinished = True
        self._room = 0
        scratch = self._scratch
        if self.only_handshake and not MAGIC.startswith(first := bytes(scratch[self._start : self._end][: len(MAGIC)])):
            # Fail early: a client of another protocol may wait for a reply before it sends a full header.
            raise ProtocolError(f"not a telegrad frame: it starts with {first!r}")
        while self._end - self._start >= HEADER_SIZE:
            start, end = self._start, self._end
            magic, version, kind, length, sequence, ack_control, ack_bulk = unpack_header(scratch, start)
            if magic != MAGIC or version != VERSION or kind not in KINDS or length > self.limits.frame:
                check_header(scratch, start, self.limits)  # raises the matching error
            if self.only_handshake and kind != Kind.HANDSHAKE:
                raise ProtocolError(f"a frame of kind {kind} before the handshake")
            body_start = start + HEADER_SIZE
            available = end - body_start
            body: memoryview | bytearray | None
            if kind == BULK_CHUNK:
                body = self.destination(sequence, length)
            elif available >= length:
                frame = new_frame((kind, sequence, ack_control, ack_bulk, scratch[body_start : body_start + length]))
                self._start = body_start + length  # not earlier: after a MemoryError `advance` tries again
                yield frame
                continue
            elif length + HEADER_SIZE <= len(scratch) // 2:
                break  # the remainder is read into scratch
            else:
                body = _allocate_body(length) if length <= self._most_stored else None
            got = min(available, length)
            if body is None:
                self._header = (kind, sequence, ack_control, ack_bulk)
                self._body = scratch[body_start : body_start + min(got, TRUNCATED_SIZE)]
                self._start = body_start + got
                if got < length:
                    self._skip = length - got
                    break
                truncated, self._body = self._body, _NOTHING
                yield TruncatedFrame(*self._header, truncated)
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
