"""Puts messages together from the frames that came.

A message for which there is no memory is not a fault of its sender, and must not end the session. It is read to its
end, and comes out as an `Unread`: its head tells which call it belongs to, and whoever looks at its contents gets the
error.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from telegrad.errors import LimitExceeded, ProtocolError, ResourceExhausted
from telegrad.wire.frames import (
    BEGINNING,
    BULK_CHUNK,
    BULK_HEAD,
    LENT,
    MESSAGE,
    PREFIX_SIZE,
    CutFrame,
    Frame,
    Limits,
    Message,
    aligned,
    next_chunk,
    unpack_prefix,
)
from telegrad.wire.slab_messages import PLACE_SIZE, unpack_place

_new_message: Callable[[tuple[memoryview, memoryview, memoryview, int]], Message] = partial(tuple.__new__, Message)


class Unread(Message):
    """A message for whose contents there was no memory. They came, and were not kept.

    >>> Unread(b"head", 1000, ResourceExhausted("no memory")).region
    Traceback (most recent call last):
    telegrad.errors.ResourceExhausted: no memory
    """

    error: ResourceExhausted
    cut: bool
    """Whether `head` is its beginning only."""

    def __new__(
        cls, head: bytes | bytearray | memoryview, size: int, error: ResourceExhausted, *, cut: bool = False
    ) -> Unread:
        made = tuple.__new__(cls, (memoryview(head), _EMPTY, _EMPTY, size))
        made.error, made.cut = error, cut
        return made

    @property
    def data(self) -> memoryview:
        """There is none."""
        raise self.error

    @property
    def region(self) -> memoryview:
        """There is none."""
        raise self.error


_EMPTY = memoryview(b"")


def _nothing_is_lent(slab: int, offset: int, size: int, number: int) -> memoryview:
    raise ProtocolError("a message in shared memory came over a connection that shares none")


def head_of(frame: Frame) -> bytes:
    """The head of a message, or its beginning, as far as the frame has it."""
    if frame.kind == BULK_CHUNK:
        return b""
    return bytes(frame.body[PREFIX_SIZE + (PLACE_SIZE if frame.kind == LENT else 0) :][:BEGINNING])


class Assembler:
    """Puts the messages of one session together, across connections.

    A stream writes the body of a chunk straight to the place that `place` names; the chunk counts only when `add`
    is called for it, so a chunk that a broken connection cut short is simply written again. `where` names this worker
    and its peer in errors.
    """

    def __init__(self, limits: Limits, allocate: Callable[[int], memoryview], where: str = "this worker") -> None:
        self.borrow: Callable[[int, int, int, int], memoryview] = _nothing_is_lent
        """Gives the region that a peer lent: slab, offset, size and number."""
        self._limits = limits
        self._allocate = allocate
        self._where = where
        self._head: bytes | bytearray | memoryview = b""
        self._lengths = (0, 0, 0)
        self._buffer: memoryview | None = None
        self._unread: Unread | None = None  # the message, if there is no memory for it
        self._size = 0  # of the buffer, whether there is one or not
        self._filled = 0

    def place(self, length: int) -> memoryview | None:
        """Where the body of the chunk that comes next belongs; None: nowhere, there is no memory for the message."""
        if self._buffer is None and self._unread is None:
            raise ProtocolError("a BULK_CHUNK without a BULK_HEAD before it")
        due = next_chunk(self._size - self._filled)
        if length != due:
            raise ProtocolError(f"a BULK_CHUNK of {length:,} bytes where one of {due:,} is due")
        return None if self._buffer is None else self._buffer[self._filled : self._filled + length]

    def read(self, frame: Frame) -> Message | None:
        """The message, if the frame is a whole one. Lengths that contradict each other are a ProtocolError.

        This changes nothing. It is called before the session counts the frame, so that a frame that was garbled on
        the way comes again, on the next connection.
        """
        kind, _, _, _, body = frame
        if kind == MESSAGE:
            size = len(body)
            if size < PREFIX_SIZE or size > self._limits.message:
                self._read_prefix(body)  # which says what is wrong with it, if anything is
            head, data, region = unpack_prefix(body)
            start = PREFIX_SIZE + head
            end = start + data
            if size != ((end + 15) & ~15) + region if region else size != end:
                self._read_prefix(body)
                if type(frame) is CutFrame:
                    return self._without(frame, PREFIX_SIZE, aligned(end) + region)
                raise ProtocolError(f"a message of {head} + {data} + {region} bytes in a frame of {size}")
            view = memoryview(body)
            return _new_message((view[PREFIX_SIZE:start], view[start:end], view[size - region :], size))
        if kind == BULK_HEAD:
            head, _, _ = self._read_prefix(body)
            if len(body) != PREFIX_SIZE + head and type(frame) is not CutFrame:
                raise ProtocolError(f"a BULK_HEAD of {len(body)} bytes announces a head of {head}")
        elif kind == LENT:
            return self._read_lent(frame)
        elif kind != BULK_CHUNK:
            raise ProtocolError(f"a frame of kind {kind} is not part of a message")
        return None

    def _read_lent(self, frame: Frame) -> Message:
        body = frame.body
        head, data, region = self._read_prefix(body)
        start = PREFIX_SIZE + PLACE_SIZE
        if len(body) != start + head and type(frame) is not CutFrame:
            raise ProtocolError(f"a LENT of {len(body)} bytes announces a head of {head}")
        slab, offset, number = unpack_place(body, PREFIX_SIZE)
        memory = self.borrow(slab, offset, data + region, number)
        if type(frame) is CutFrame:
            return self._without(frame, start, start + head + data + region)  # and the region goes back
        return Message(memoryview(body)[start:], memory[region:], memory[:region], len(body))

    def _without(self, frame: Frame, start: int, size: int) -> Unread:
        """What stands for a message whose head was cut: there is no memory for it."""
        return Unread(bytes(frame.body[start:]), size, self._no_memory(size), cut=True)

    def _no_memory(self, size: int) -> ResourceExhausted:
        return ResourceExhausted(
            f"{self._where}: there is no memory for a message of {size:,} bytes. Send less at once, or give the worker "
            "more memory"
        )

    def add(self, frame: Frame) -> Message | None:
        """Take a part of a large message, which the session let through; return the message that it completes."""
        body = frame.body
        if frame.kind == BULK_HEAD:
            if self._buffer is not None or self._unread is not None:
                raise ProtocolError("a BULK_HEAD in the middle of another large message")
            self._lengths = head, data, region = self._read_prefix(body)
            self._head, self._filled, self._size = body, 0, aligned(data) + region
            cut = type(frame) is CutFrame
            try:
                self._buffer = None if cut else self._allocate(self._size)
            except MemoryError:
                self._buffer = None
            if self._buffer is None:
                size = PREFIX_SIZE + head + self._size
                self._unread = Unread(body[PREFIX_SIZE:], size, self._no_memory(size), cut=cut)
        else:
            place = self.place(next_chunk(self._size - self._filled) if type(frame) is CutFrame else len(body))
            if place is None:
                self._filled += next_chunk(self._size - self._filled)
            else:
                if not (isinstance(body, memoryview) and body.obj is place.obj):  # not already there
                    place[:] = body
                self._filled += len(body)
        return self._complete()

    def _complete(self) -> Message | None:
        if self._filled < self._size:
            return None
        unread, self._unread = self._unread, None
        if unread is not None:
            self._head = b""
            return unread
        buffer = self._buffer
        assert buffer is not None
        head, data, region = self._lengths
        self._buffer = None
        start = len(buffer) - region
        view = memoryview(self._head)
        self._head = b""
        return Message(view[PREFIX_SIZE:], buffer[:data], buffer[start:], PREFIX_SIZE + head + len(buffer))

    def _read_prefix(self, body: bytes | bytearray | memoryview) -> tuple[int, int, int]:
        if len(body) < PREFIX_SIZE:
            raise ProtocolError(f"a message of {len(body)} bytes is shorter than its prefix")
        head, data, region = unpack_prefix(body)
        if aligned(data) + region > self._limits.message:
            raise LimitExceeded(f"a message of {aligned(data) + region:,} bytes; the limit is {self._limits.message:,}")
        return head, data, region
