"""Reassemble messages from received frames.

A message that does not fit into memory must not end the session. It is read to its end and becomes a
`DiscardedMessage`: its head identifies the call, and access to its contents raises the error.
"""

from __future__ import annotations

from collections.abc import Callable

from telegrad.errors import CallError, LimitExceeded, ProtocolError, ResourceExhausted
from telegrad.wire.frames import (
    BULK_CHUNK,
    BULK_HEAD,
    MESSAGE,
    PREFIX_SIZE,
    SHARED_MESSAGE,
    TRUNCATED_SIZE,
    Frame,
    Limits,
    Message,
    TruncatedFrame,
    aligned,
    next_chunk,
    unpack_prefix,
)
from telegrad.wire.slab_messages import LOCATION_SIZE, unpack_location


class DiscardedMessage(Message, frozen=True, gc=True):
    """A message whose contents were received and discarded: there was no memory for them, or a limit forbids them.

    >>> discarded(b"head", 1000, ResourceExhausted("no memory")).region
    Traceback (most recent call last):
    telegrad.errors.ResourceExhausted: no memory
    """

    error: CallError
    truncated: bool
    """Whether `head` is incomplete."""

    @property  # type: ignore[misc]  # replaces a field: there are no contents
    def data(self) -> memoryview:
        """Raise the error."""
        raise self.error

    @property  # type: ignore[misc]  # as above
    def region(self) -> memoryview:
        """Raise the error."""
        raise self.error


_EMPTY = memoryview(b"")


def discarded(
    head: bytes | bytearray | memoryview, size: int, error: CallError, *, truncated: bool = False
) -> DiscardedMessage:
    """Return the placeholder for a message of this head and size."""
    return DiscardedMessage(memoryview(head), _EMPTY, _EMPTY, size, size, error, truncated)


def _no_shared_memory(slab: int, offset: int, size: int, number: int) -> memoryview:
    raise ProtocolError("a peer sent a message in shared memory over a connection without shared memory")


def peek_head(frame: Frame) -> bytes:
    """Return the first bytes of a message's head, as far as the frame contains them."""
    if frame.kind == BULK_CHUNK:
        return b""
    return bytes(frame.body[PREFIX_SIZE + (LOCATION_SIZE if frame.kind == SHARED_MESSAGE else 0) :][:TRUNCATED_SIZE])


class Assembler:
    """Reassembles the messages of one session, across reconnects.

    The body of a chunk is read directly into the buffer that `destination` returns. The chunk counts only once `add`
    is called for it, so a chunk that a broken connection interrupted is simply read again. `where` names this worker
    and its peer in errors.
    """

    def __init__(self, limits: Limits, allocate: Callable[[int], memoryview], where: str = "this worker") -> None:
        self.open_region: Callable[[int, int, int, int], memoryview] = _no_shared_memory
        """Returns a region of a peer's shared memory, given slab, offset, size and number."""
        self.refuse: Callable[[int], CallError | None] | None = None
        """Returns why a message of a size is refused, if it is. Asked for messages that were not stored."""
        self.reserve: Callable[[int], CallError | None] | None = None
        """As `refuse`, before memory for a large message is allocated."""
        self._limits = limits
        self._allocate = allocate
        self._where = where
        self._head: bytes | bytearray | memoryview = b""
        self._lengths = (0, 0, 0)
        self._buffer: memoryview | None = None
        self._discarded: DiscardedMessage | None = None  # the message, if there is no memory for it
        self._size = 0  # of the buffer, even if it could not be allocated
        self._filled = 0

    def destination(self, length: int) -> memoryview | None:
        """Return the buffer for the body of the next chunk, or None if there is no memory for the message."""
        if self._buffer is None and self._discarded is None:
            raise ProtocolError("a BULK_CHUNK without a BULK_HEAD before it")
        due = next_chunk(self._size - self._filled)
        if length != due:
            raise ProtocolError(f"a BULK_CHUNK of {length:,} bytes where one of {due:,} is due")
        return None if self._buffer is None else self._buffer[self._filled : self._filled + length]

    def read(self, frame: Frame) -> Message | None:
        """Return the message, if the frame contains a whole one. Raise ProtocolError for inconsistent lengths.

        This changes no state. It is called before the session counts the frame, so a corrupted frame is sent again
        over the next connection.
        """
        kind, _, _, _, body = frame
        if kind == MESSAGE:
            size = len(body)
            if size < PREFIX_SIZE or size > self._limits.message:
                self._read_prefix(body)  # raises the matching error, if any
            head, data, region = unpack_prefix(body)
            start = PREFIX_SIZE + head
            end = start + data
            if size != ((end + 15) & ~15) + region if region else size != end:
                self._read_prefix(body)
                if type(frame) is TruncatedFrame:
                    return self._discard(frame, PREFIX_SIZE, aligned(end) + region)
                raise ProtocolError(f"a message of {head} + {data} + {region} bytes in a frame of {size}")
            view = memoryview(body)
            return Message(view[PREFIX_SIZE:start], view[start:end], view[size - region :], size, size)
        if kind == BULK_HEAD:
            head, _, _ = self._read_prefix(body)
            if len(body) != PREFIX_SIZE + head and type(frame) is not TruncatedFrame:
                raise ProtocolError(f"a BULK_HEAD of {len(body)} bytes announces a head of {head}")
        elif kind == SHARED_MESSAGE:
            return self._read_shared(frame)
        elif kind != BULK_CHUNK:
            raise ProtocolError(f"a frame of kind {kind} is not part of a message")
        return None

    def _read_shared(self, frame: Frame) -> Message:
        body = frame.body
        head, data, region = self._read_prefix(body)
        start = PREFIX_SIZE + LOCATION_SIZE
        if len(body) != start + head and type(frame) is not TruncatedFrame:
            raise ProtocolError(f"a SHARED_MESSAGE of {len(body)} bytes announces a head of {head}")
        slab, offset, number = unpack_location(body, PREFIX_SIZE)
        memory = self.open_region(slab, offset, data + region, number)
        if type(frame) is TruncatedFrame:
            return self._discard(frame, start, start + head + data + region)  # and the region is freed
        size = len(body)
        return Message(memoryview(body)[start:], memory[region:], memory[:region], size, size + data + region)

    def _discard(self, frame: Frame, start: int, size: int) -> DiscardedMessage:
        """Return the placeholder for a message whose head is truncated."""
        refusal = self.refuse(size) if self.refuse is not None else None
        return discarded(bytes(frame.body[start:]), size, refusal or self._no_memory(size), truncated=True)

    def _no_memory(self, size: int) -> ResourceExhausted:
        return ResourceExhausted(
            f"{self._where}: there is no memory for a message of {size:,} bytes. Send smaller messages or give the "
            "worker more memory"
        )

    def add(self, frame: Frame) -> Message | None:
        """Add a frame of a large message, which the session accepted; return the message that it completes, if any."""
        body = frame.body
        if frame.kind == BULK_HEAD:
            if self._buffer is not None or self._discarded is not None:
                raise ProtocolError("a BULK_HEAD in the middle of another large message")
            self._lengths = head, data, region = self._read_prefix(body)
            self._head, self._filled, self._size = body, 0, aligned(data) + region
            truncated, size = type(frame) is TruncatedFrame, PREFIX_SIZE + head + self._size
            refusal = self.reserve(size) if self.reserve is not None else None
            try:
                self._buffer = None if truncated or refusal is not None else self._allocate(self._size)
            except MemoryError:
                self._buffer = None
            if self._buffer is None:
                error = refusal or self._no_memory(size)
                self._discarded = discarded(body[PREFIX_SIZE:], size, error, truncated=truncated)
        else:
            target = self.destination(
                next_chunk(self._size - self._filled) if type(frame) is TruncatedFrame else len(body)
            )
            if target is None:
                self._filled += next_chunk(self._size - self._filled)
            else:
                if not (isinstance(body, memoryview) and body.obj is target.obj):  # not read into it already
                    target[:] = body
                self._filled += len(body)
        return self._complete()

    def _complete(self) -> Message | None:
        if self._filled < self._size:
            return None
        placeholder, self._discarded = self._discarded, None
        if placeholder is not None:
            self._head = b""
            return placeholder
        buffer = self._buffer
        assert buffer is not None
        head, data, region = self._lengths
        self._buffer = None
        start = len(buffer) - region
        view = memoryview(self._head)
        self._head = b""
        size = PREFIX_SIZE + head + len(buffer)
        return Message(view[PREFIX_SIZE:], buffer[:data], buffer[start:], size, size)

    def _read_prefix(self, body: bytes | bytearray | memoryview) -> tuple[int, int, int]:
        if len(body) < PREFIX_SIZE:
            raise ProtocolError(f"a message of {len(body)} bytes is shorter than its prefix")
        head, data, region = unpack_prefix(body)
        if aligned(data) + region > self._limits.message:
            raise LimitExceeded(f"a message of {aligned(data) + region:,} bytes; the limit is {self._limits.message:,}")
        return head, data, region
