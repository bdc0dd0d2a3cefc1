"""A message for which there is no memory costs that message, and nothing else of the stream."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from telegrad.errors import ResourceExhausted
from telegrad.wire import frame_reader, frames
from telegrad.wire.frame_reader import FrameReader
from telegrad.wire.frames import CHUNK, Frame, Limits, Message, lane_of, pack_header
from telegrad.wire.packing import pack
from telegrad.wire.reassembly import Assembler, DiscardedMessage

HERE = "worker 'a', from worker 'b'"


class Contents:
    """The region of a message."""

    def __init__(self, contents: bytes) -> None:
        self._contents = contents
        self.size = len(contents)

    def write(self, view: memoryview, /) -> None:
        view[:] = self._contents

    def copy(self) -> bytes | None:
        return self._contents


class Stream:
    """A session in small: what is sent over it is cut into pieces, read and put together."""

    def __init__(self, piece: int) -> None:
        self.short = False
        self.assembler = Assembler(Limits(), self._allocate, HERE)
        self.reader = FrameReader(frames.HANDSHAKE_LIMITS)
        self.reader.admit(Limits(), lambda sequence, length: self.assembler.destination(length))
        self._piece = piece
        self._sent = [0, 0]

    def _allocate(self, size: int) -> memoryview:
        if self.short:
            raise MemoryError
        return memoryview(bytearray(size))

    def carry(self, head: bytes, data: bytes, region: bytes) -> list[Message]:
        stream = bytearray()
        for kind, body, _ in pack(head, data, Contents(region), lambda size: memoryview(bytearray(size))):
            lane = lane_of(kind)
            self._sent[lane] += 1
            stream += pack_header(kind, len(body), self._sent[lane], 0, 0) + bytes(body)
        return [message for frame in self._read(bytes(stream)) if (message := self._take(frame)) is not None]

    def _read(self, stream: bytes) -> Iterator[Frame]:
        rest = memoryview(stream)
        while rest:
            buffer = self.reader.buffer()
            count = min(len(buffer), len(rest), self._piece)
            buffer[:count] = rest[:count]
            rest = rest[count:]
            try:
                yield from self.reader.advance(count)
            except MemoryError:
                yield from self.reader.advance(0)

    def _take(self, frame: Frame) -> Message | None:
        return self.assembler.read(frame) or (self.assembler.add(frame) if frame.kind != frames.MESSAGE else None)


def parts(message: Message) -> tuple[bytes, bytes, bytes]:
    return bytes(message.head), bytes(message.data), bytes(message.region)


@pytest.mark.parametrize("piece", [7_777, 65_536, 10**9])
def test_a_message_without_memory_for_its_contents_comes_out_without_them_and_the_next_one_whole(piece: int) -> None:
    contents = b"r" * (3 * CHUNK + 17)
    stream = Stream(piece)
    stream.short = True
    (unread,) = stream.carry(b"head", b"data", contents)
    assert isinstance(unread, DiscardedMessage)
    assert bytes(unread.head) == b"head"
    assert not unread.truncated
    with pytest.raises(
        ResourceExhausted, match=r"worker 'a', from worker 'b': .* no memory .* 1,57\d,\d{3} bytes. Send"
    ):
        assert unread.region
    stream.short = False
    assert [parts(message) for message in stream.carry(b"next", b"", contents)] == [(b"next", b"", contents)]


@pytest.mark.parametrize("piece", [33, 7_777, 65_536, 10**9])
def test_a_message_without_memory_for_its_head_tells_its_beginning(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    head, contents = bytes(range(256)) * 1000, b"r" * (CHUNK + 17)
    stream = Stream(piece)
    with monkeypatch.context() as patch:
        patch.setattr(frame_reader, "_allocate_body", lambda length: None)
        (unread,) = stream.carry(head, b"", contents)
    assert isinstance(unread, DiscardedMessage)
    assert unread.truncated
    assert 128 < len(unread.head) < 512
    assert head.startswith(bytes(unread.head))
    assert [parts(message) for message in stream.carry(head, b"d", contents)] == [(head, b"d", contents)]


class Forgetful(bytearray):
    """Memory from which nothing can be copied, once."""

    failed = False

    def __getitem__(self, key: object) -> object:
        if not self.failed:
            self.failed = True
            raise MemoryError
        return super().__getitem__(key)  # type: ignore[index]


def test_a_small_message_without_memory_for_a_copy_is_read_the_next_time() -> None:
    stream = Stream(10**9)
    reader = stream.reader
    reader._scratch = Forgetful(reader._scratch)
    reader._view = memoryview(reader._scratch)
    assert [parts(message) for message in stream.carry(b"head", b"data", b"")] == [(b"head", b"data", b"")]
    assert reader._scratch.failed
    frame = pack_header(frames.MESSAGE, 16, 2, 0, 0) + bytes(16)
    reader._scratch.failed = False
    reader._view[: len(frame)] = frame
    with pytest.raises(MemoryError):
        reader.take_single(len(frame))
    assert reader.unfinished
    assert [each.sequence for each in reader.advance(0)] == [2]
