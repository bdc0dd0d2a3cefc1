"""Messages are reassembled from frames, across reconnects, and within the limits.

A message that does not fit into memory is discarded. The stream continues with the next message.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.message_stream import (
    Contents,
    Receiver,
    allocate,
    allocate_nothing,
    assemble,
    cycle,
    feed,
    frames_of,
    parts,
    read_all,
    stream_of,
)

from telegrad.errors import LimitExceeded, ProtocolError, ResourceExhausted
from telegrad.wire import frame_reader, frames
from telegrad.wire.frame_reader import FrameReader
from telegrad.wire.frames import (
    BULK,
    BULK_CHUNK,
    BULK_HEAD,
    CHUNK,
    INLINE_LIMIT,
    MESSAGE,
    PREFIX_SIZE,
    SHARED_MESSAGE,
    Frame,
    Kind,
    Limits,
    Message,
    TruncatedFrame,
    lane_of,
    pack_header,
)
from telegrad.wire.packing import pack
from telegrad.wire.reassembly import Assembler, DiscardedMessage, peek_head

SMALL = Limits(frame=200_000, message=300_000)
WHERE = "worker 'a', from worker 'b'"


def test_a_large_message_with_only_a_head_needs_no_chunk() -> None:
    head = b"h" * (INLINE_LIMIT + 1)
    (frame,) = frames_of(head, b"", b"")
    message = assemble(Assembler(Limits(), allocate), Frame(frame.kind, 1, 0, 0, frame.body))
    assert message is not None
    assert parts(message) == (head, b"", b"")


def test_small_messages_may_be_sent_between_the_chunks_of_a_large_one() -> None:
    large = frames_of(b"large", b"", b"r" * (3 * CHUNK))
    (small,) = frames_of(b"small", b"", b"")
    stream = bytearray()
    for number, (kind, body, _) in enumerate(large, start=1):
        stream += pack_header(kind, len(body), number, 0, 0) + bytes(body)
        stream += pack_header(small.kind, len(small.body), number, 0, 0) + bytes(small.body)
    receiver = Receiver()
    for frame in feed(receiver.connect(), bytes(stream), cycle(100_000, 7)):
        receiver.handle(frame)
    assert [head for head, _, _ in receiver.messages] == [b"small"] * 3 + [b"large", b"small"]


def test_chunks_are_read_directly_into_the_buffer_of_the_message() -> None:
    buffers: list[memoryview] = []

    def record(size: int) -> memoryview:
        buffers.append(allocate(size))
        return buffers[-1]

    receiver = Receiver(Assembler(Limits(), record))
    for frame in feed(receiver.connect(), stream_of((b"h", b"d", b"r" * (2 * CHUNK))), cycle(50_000)):
        if frame.kind == BULK_CHUNK:
            assert isinstance(frame.body, memoryview)
            assert frame.body.obj is buffers[0].obj
        receiver.handle(frame)
    assert len(buffers) == 1
    assert receiver.messages == [(b"h", b"d", b"r" * (2 * CHUNK))]


@settings(deadline=None, max_examples=60)
@given(where=st.floats(0, 1), piece=st.integers(300, 300_000))
def test_an_interrupted_message_continues_over_the_next_connection(where: float, piece: int) -> None:
    sent = [(b"first", b"", b""), (b"large", b"data", bytes(range(256)) * (3 * CHUNK // 256)), (b"last", b"", b"")]
    stream = stream_of(*sent)
    receiver = Receiver()
    for frame in feed(receiver.connect(), stream[: int(where * len(stream))], cycle(piece)):
        receiver.handle(frame)
    # The sender does not know how much was received, and sends everything again.
    for frame in feed(receiver.connect(), stream, cycle(piece)):
        receiver.handle(frame)
    assert receiver.messages == sent


def test_an_interrupted_chunk_is_read_again_into_the_same_buffer() -> None:
    region = bytes(range(256)) * (2 * CHUNK // 256)
    frames = frames_of(b"h", b"", region)
    stream = [pack_header(kind, len(body), n, 0, 0) + bytes(body) for n, (kind, body, _) in enumerate(frames, start=1)]
    receiver = Receiver()
    for frame in feed(receiver.connect(), b"".join([*stream[:2], stream[2][: CHUNK // 2]]), cycle(65_536)):
        receiver.handle(frame)
    assert receiver.received[BULK] == 2
    assert receiver.chunks == [2, 3]
    for frame in feed(receiver.connect(), b"".join(stream[2:]), cycle(65_536)):
        receiver.handle(frame)
    assert receiver.chunks == [2, 3, 3]
    assert receiver.messages == [(b"h", b"", region)]


def test_a_duplicate_chunk_is_discarded() -> None:
    sent = (b"h", b"", b"r" * CHUNK + b"s" * CHUNK)
    stream = stream_of(sent)
    receiver = Receiver()
    reader = receiver.connect()
    for frame in feed(reader, stream + stream, cycle(100_000)):
        receiver.handle(frame)
    assert receiver.messages == [sent]
    assert receiver.chunks == [2, 3]


@pytest.mark.parametrize("kind", [MESSAGE, BULK_HEAD])
@pytest.mark.parametrize(("data", "region"), [(300_001, 0), (0, 300_001), (299_999, 2), (2**32 - 1, 2**64 - 1)])
def test_a_message_above_the_limit_allocates_nothing(kind: int, data: int, region: int) -> None:
    body = (0).to_bytes(4, "little") + data.to_bytes(4, "little") + region.to_bytes(8, "little")
    with pytest.raises(LimitExceeded, match="the limit is 300,000"):
        assemble(Assembler(SMALL, allocate_nothing), Frame(kind, 1, 0, 0, body))


@pytest.mark.parametrize(
    ("head", "data", "region"), [(5, 0, 0), (3, 0, 0), (4, 1, 0), (4, 0, 1), (2**32 - 1, 0, 0), (0, 0, 5)]
)
def test_lengths_that_do_not_match_the_frame_are_refused(head: int, data: int, region: int) -> None:
    prefix = head.to_bytes(4, "little") + data.to_bytes(4, "little") + region.to_bytes(8, "little")
    for kind in (MESSAGE, BULK_HEAD) if not (data or region) else (MESSAGE,):
        with pytest.raises(ProtocolError):
            assemble(Assembler(Limits(), allocate_nothing), Frame(kind, 1, 0, 0, prefix + b"four"))


@pytest.mark.parametrize("size", range(PREFIX_SIZE))
@pytest.mark.parametrize("kind", [MESSAGE, BULK_HEAD])
def test_a_message_shorter_than_its_prefix_is_refused(kind: int, size: int) -> None:
    with pytest.raises(ProtocolError, match="shorter than its prefix"):
        assemble(Assembler(Limits(), allocate_nothing), Frame(kind, 1, 0, 0, bytes(size)))


def test_a_chunk_without_a_message_is_refused() -> None:
    receiver = Receiver()
    with pytest.raises(ProtocolError, match="without a BULK_HEAD"):
        read_all(receiver.connect(), pack_header(BULK_CHUNK, 10, 1, 0, 0) + bytes(10))
    with pytest.raises(ProtocolError, match="without a BULK_HEAD"):
        assemble(Assembler(Limits(), allocate_nothing), Frame(BULK_CHUNK, 1, 0, 0, b"x"))


@pytest.mark.parametrize("length", [0, 1, CHUNK - 1])
def test_a_chunk_that_is_too_small_is_refused(length: int) -> None:
    receiver = Receiver()
    head = frames_of(b"h", b"", b"r" * (2 * CHUNK))[0]
    stream = pack_header(head.kind, len(head.body), 1, 0, 0) + bytes(head.body)
    with pytest.raises(ProtocolError, match="where one of 524,288 is due"):
        receiver.handle_all(stream + pack_header(BULK_CHUNK, length, 2, 0, 0))


def test_reading_a_frame_changes_nothing() -> None:
    assembler = Assembler(Limits(), allocate)
    frames = frames_of(b"h", b"", b"r" * CHUNK)
    head, chunk = (Frame(kind, n, 0, 0, body) for n, (kind, body, _) in enumerate(frames, 1))
    for _ in range(3):
        assert assembler.read(head) is None
    assert assembler.add(head) is None
    for _ in range(3):
        assert assembler.read(chunk) is None
    message = assembler.add(chunk)
    assert message is not None
    assert parts(message) == (b"h", b"", b"r" * CHUNK)


def test_a_chunk_after_the_end_of_its_message_is_refused() -> None:
    receiver = Receiver()
    stream = stream_of((b"h", b"", b"r" * CHUNK)) + pack_header(BULK_CHUNK, 1, 3, 0, 0) + b"x"
    with pytest.raises(ProtocolError, match="without a BULK_HEAD"):
        receiver.handle_all(stream)
    assert len(receiver.messages) == 1


def test_a_chunk_that_is_too_large_is_refused() -> None:
    receiver = Receiver()
    head, chunk = frames_of(b"h", b"", b"r" * (INLINE_LIMIT + 1))
    stream = pack_header(head.kind, len(head.body), 1, 0, 0) + bytes(head.body)
    stream += pack_header(chunk.kind, len(chunk.body) + 1, 2, 0, 0)
    with pytest.raises(ProtocolError, match="a BULK_CHUNK of 65,538 bytes where one of 65,537 is due"):
        receiver.handle_all(stream)


def test_a_large_message_inside_another_is_refused() -> None:
    assembler = Assembler(Limits(), allocate)
    head, _ = frames_of(b"h", b"", b"r" * (INLINE_LIMIT + 1))
    assert assemble(assembler, Frame(head.kind, 1, 0, 0, head.body)) is None
    with pytest.raises(ProtocolError, match="in the middle of another"):
        assemble(assembler, Frame(head.kind, 2, 0, 0, head.body))


@pytest.mark.parametrize("kind", [Kind.HANDSHAKE, Kind.ACK, Kind.PING, Kind.GOODBYE])
def test_frames_that_are_not_part_of_a_message_are_refused(kind: int) -> None:
    with pytest.raises(ProtocolError, match="not part of a message"):
        assemble(Assembler(Limits(), allocate_nothing), Frame(kind, 1, 0, 0, b""))


class Stream:
    """A connection that delivers its bytes in pieces, and may run out of memory."""

    def __init__(self, piece: int) -> None:
        self.no_memory = False
        self.assembler = Assembler(Limits(), self._allocate, WHERE)
        self.reader = FrameReader(frames.HANDSHAKE_LIMITS)
        self.reader.admit(Limits(), lambda sequence, length: self.assembler.destination(length))
        self._piece = piece
        self._sent = [0, 0]

    def _allocate(self, size: int) -> memoryview:
        if self.no_memory:
            raise MemoryError
        return memoryview(bytearray(size))

    def send(self, head: bytes, data: bytes, region: bytes) -> list[Message]:
        stream = bytearray()
        for kind, body, _ in pack(head, data, Contents(region, copied=True), allocate):
            lane = lane_of(kind)
            self._sent[lane] += 1
            stream += pack_header(kind, len(body), self._sent[lane], 0, 0) + bytes(body)
        return [message for frame in self._read(bytes(stream)) if (message := self._handle(frame)) is not None]

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

    def _handle(self, frame: Frame) -> Message | None:
        return self.assembler.read(frame) or (self.assembler.add(frame) if frame.kind != frames.MESSAGE else None)


@pytest.mark.parametrize("piece", [7_777, 65_536, 10**9])
def test_a_message_without_memory_for_its_contents_is_discarded_and_the_next_one_is_received(piece: int) -> None:
    contents = b"r" * (3 * CHUNK + 17)
    stream = Stream(piece)
    stream.no_memory = True
    (discarded,) = stream.send(b"head", b"data", contents)
    assert isinstance(discarded, DiscardedMessage)
    assert bytes(discarded.head) == b"head"
    assert not discarded.truncated
    with pytest.raises(
        ResourceExhausted, match=r"worker 'a', from worker 'b': .* no memory .* 1,57\d,\d{3} bytes. Send"
    ):
        assert discarded.region
    stream.no_memory = False
    assert [parts(message) for message in stream.send(b"next", b"", contents)] == [(b"next", b"", contents)]


@pytest.mark.parametrize("piece", [33, 7_777, 65_536, 10**9])
def test_a_message_without_memory_for_its_head_keeps_the_start_of_the_head(
    piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    head, contents = bytes(range(256)) * 1000, b"r" * (CHUNK + 17)
    stream = Stream(piece)
    with monkeypatch.context() as patch:
        patch.setattr(frame_reader, "_allocate_body", lambda length: None)
        (discarded,) = stream.send(head, b"", contents)
    assert isinstance(discarded, DiscardedMessage)
    assert discarded.truncated
    assert 128 < len(discarded.head) < 512
    assert head.startswith(bytes(discarded.head))
    assert [parts(message) for message in stream.send(head, b"d", contents)] == [(head, b"d", contents)]


class FailingOnce(bytearray):
    """A buffer whose first slice raises MemoryError."""

    failed = False

    def __getitem__(self, key: object) -> object:
        if not self.failed:
            self.failed = True
            raise MemoryError
        return super().__getitem__(key)  # type: ignore[index]


def test_a_small_message_is_read_again_after_a_memory_error() -> None:
    stream = Stream(10**9)
    reader = stream.reader
    reader._scratch = FailingOnce(reader._scratch)
    reader._view = memoryview(reader._scratch)
    assert [parts(message) for message in stream.send(b"head", b"data", b"")] == [(b"head", b"data", b"")]
    assert reader._scratch.failed
    frame = pack_header(frames.MESSAGE, 16, 2, 0, 0) + bytes(16)
    reader._scratch.failed = False
    reader._view[: len(frame)] = frame
    with pytest.raises(MemoryError):
        reader.take_single(len(frame))
    assert reader.unfinished
    assert [each.sequence for each in reader.advance(0)] == [2]


@pytest.mark.parametrize("piece", [40_000, 65_536])
def test_a_single_frame_message_without_memory_is_discarded(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A MESSAGE of up to `Limits.frame` is legal, although `pack` sends chunks."""
    head, data = b"h" * 300, b"d" * 200_000
    prefix = len(head).to_bytes(4, "little") + len(data).to_bytes(4, "little") + bytes(8)
    body = prefix + head + data
    reader = Receiver().connect()
    with monkeypatch.context() as patch:
        patch.setattr(frame_reader, "_allocate_body", lambda length: None)
        (frame,) = read_all(reader, pack_header(MESSAGE, len(body), 1, 0, 0) + body, piece)
    discarded = Assembler(Limits(), allocate_nothing, WHERE).read(frame)
    assert isinstance(discarded, DiscardedMessage)
    assert discarded.truncated
    assert bytes(discarded.head) == head[: 256 - PREFIX_SIZE]
    with pytest.raises(ResourceExhausted, match="no memory for a message of 200,320 bytes"):
        assert discarded.data


def shared_frame(kind: type[Frame], head: bytes, cut: int | None = None) -> Frame:
    body = len(head).to_bytes(4, "little") + (0).to_bytes(4, "little") + (100).to_bytes(8, "little")
    body += (7).to_bytes(8, "little") + (4096).to_bytes(8, "little") + (9).to_bytes(8, "little") + head
    return kind(SHARED_MESSAGE, 1, 0, 0, body[:cut])


def test_a_truncated_message_in_shared_memory_is_discarded_and_its_region_freed() -> None:
    opened: list[tuple[int, int, int, int]] = []

    def open_region(slab: int, offset: int, size: int, number: int) -> memoryview:
        opened.append((slab, offset, size, number))
        return allocate(size)

    assembler = Assembler(Limits(), allocate_nothing, WHERE)
    assembler.open_region = open_region
    discarded = assembler.read(shared_frame(TruncatedFrame, b"h" * 300, 256))
    assert isinstance(discarded, DiscardedMessage)
    assert bytes(discarded.head) == b"h" * 216
    assert opened == [(7, 4096, 100, 9)], "a region that is never opened would never be freed"


def test_the_head_of_any_frame_can_be_peeked_at() -> None:
    (small,) = frames_of(b"small", b"data", b"")
    assert peek_head(Frame(small.kind, 1, 0, 0, small.body)).startswith(b"small")
    large, chunk = frames_of(b"large", b"", b"r" * CHUNK)
    assert peek_head(Frame(large.kind, 1, 0, 0, large.body)) == b"large"
    assert peek_head(Frame(chunk.kind, 1, 0, 0, chunk.body)) == b""
    assert peek_head(shared_frame(Frame, b"shared")) == b"shared"
    assert peek_head(shared_frame(Frame, b"h" * 1000)) == b"h" * 256


# -- limits of a peer ---------------------------------------------------------------------------------------


def refusing(error: LimitExceeded | None) -> tuple[Assembler, list[int]]:
    asked: list[int] = []

    def ask(size: int) -> LimitExceeded | None:
        asked.append(size)
        return error

    assembler = Assembler(Limits(), allocate if error is None else allocate_nothing, WHERE)
    assembler.refuse = assembler.reserve = ask
    return assembler, asked


@pytest.mark.parametrize("error", [None, LimitExceeded("too large")])
def test_a_large_message_is_refused_when_it_is_announced(error: LimitExceeded | None) -> None:
    assembler, asked = refusing(error)
    announcement, *chunks = frames_of(b"head", b"data", b"r" * 2 * CHUNK)
    assert assemble(assembler, Frame(announcement.kind, 1, 0, 0, announcement.body)) is None
    assert asked == [PREFIX_SIZE + 4 + 16 + 2 * CHUNK]
    message = None
    for chunk in chunks:
        message = assemble(assembler, Frame(chunk.kind, 2, 0, 0, chunk.body))
    assert message is not None
    assert bytes(message.head) == b"head"
    if error is None:
        assert bytes(message.data) == b"data"
    else:
        with pytest.raises(LimitExceeded, match="too large"):
            assert message.region


def test_a_single_frame_that_was_not_stored_because_of_a_limit_says_so() -> None:
    assembler, asked = refusing(LimitExceeded("too large"))
    prefix = (300).to_bytes(4, "little") + (5000).to_bytes(4, "little") + bytes(8)
    discarded = assembler.read(TruncatedFrame(MESSAGE, 1, 0, 0, prefix + b"h" * 240))
    assert isinstance(discarded, DiscardedMessage)
    assert isinstance(discarded.error, LimitExceeded)
    assert len(asked) == 1
