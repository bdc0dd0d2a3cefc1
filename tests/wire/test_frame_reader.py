"""The reader cuts any byte stream into frames, or raises without allocating more than the limits allow."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.support.message_stream import Receiver, allocate, cycle, feed, read_all, stream_of

from telegrad.errors import LimitExceeded, ProtocolError
from telegrad.wire import frame_reader
from telegrad.wire.frame_reader import FrameReader
from telegrad.wire.frames import (
    BULK_CHUNK,
    BULK_HEAD,
    CHUNK,
    HANDSHAKE_LIMITS,
    HEADER_SIZE,
    INLINE_LIMIT,
    MESSAGE,
    TRUNCATED_SIZE,
    Frame,
    Kind,
    Limits,
    StoredLimits,
    TruncatedFrame,
    pack_header,
)
from telegrad.wire.reassembly import Assembler

SMALL = Limits(frame=200_000, message=300_000)

sizes = st.one_of(st.integers(0, 200), st.integers(INLINE_LIMIT - 200, INLINE_LIMIT + 200), st.just(CHUNK + 17))
pieces = st.lists(st.one_of(st.integers(1, 40), st.integers(1, 200_000)), min_size=1, max_size=8)
PATTERN = bytes(range(251)) * 4200


@st.composite
def messages(draw: st.DrawFn) -> tuple[bytes, bytes, bytes]:
    start = draw(st.integers(0, 250))
    head, data, region = (PATTERN[start + part : start + part + draw(sizes)] for part in range(3))
    return head, data, region


@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])  # the machine may be busy
@given(sent=st.lists(messages(), max_size=5), cuts=pieces)
def test_messages_survive_any_fragmentation(sent: list[tuple[bytes, bytes, bytes]], cuts: list[int]) -> None:
    receiver = Receiver()
    # With a large piece now and then: millions of tiny ones take minutes, and show no more.
    for frame in feed(receiver.connect(), stream_of(*sent), cycle(*cuts, 100_000)):
        assert (frame.ack_control, frame.ack_bulk) == (3, 4)
        receiver.handle(frame)
    assert receiver.messages == sent


@pytest.mark.parametrize("size", [1, HEADER_SIZE - 1, HEADER_SIZE, HEADER_SIZE + 1, 4096, 10**7])
def test_messages_survive_awkward_read_sizes(size: int) -> None:
    sent = [(b"head", b"data", b""), (b"h" * 100, b"d" * 2000, b"r" * 70_000), (b"", b"", b""), (b"h", b"", b"r" * 32)]
    receiver = Receiver()
    for frame in feed(receiver.connect(), stream_of(*sent), cycle(size)):
        receiver.handle(frame)
    assert receiver.messages == sent


def test_frames_that_were_not_consumed_remain_available() -> None:
    stream = stream_of(*[(b"%d" % number, b"", b"") for number in range(5)])
    receiver = Receiver()
    reader = receiver.connect()
    reader.buffer()[: len(stream)] = stream
    assert not reader.unfinished
    receiver.handle(next(reader.advance(len(stream))))
    assert reader.unfinished
    receiver.handle(next(reader.advance(0)))
    assert reader.unfinished
    for frame in reader.advance(0):
        receiver.handle(frame)
    assert not reader.unfinished
    assert [head for head, _, _ in receiver.messages] == [b"0", b"1", b"2", b"3", b"4"]


@settings(deadline=None)
@given(counts=st.lists(st.integers(1, 3), min_size=1), cut=st.integers(1, 500))
def test_stopping_between_any_frames_loses_nothing(counts: list[int], cut: int) -> None:
    sent = [(b"%d" % number, b"d" * (13 * number), b"r" * number) for number in range(30)]
    rest = memoryview(stream_of(*sent))
    receiver = Receiver()
    reader = receiver.connect()
    batches = cycle(*counts)
    while rest or reader.unfinished:
        if reader.unfinished:
            frames = reader.advance(0)
        else:
            buffer = reader.buffer()
            count = min(cut, len(buffer), len(rest))
            buffer[:count], rest = rest[:count], rest[count:]
            frames = reader.advance(count)
        for _, frame in zip(range(next(batches)), frames, strict=False):
            receiver.handle(frame)
        frames.close()  # type: ignore[attr-defined]  # advance is a generator
    assert receiver.messages == sent


def test_a_reader_in_the_middle_of_a_frame_is_not_unfinished() -> None:
    stream = stream_of((b"h" * 1000, b"", b""))
    reader = Receiver().connect()
    reader.buffer()[:500] = stream[:500]
    assert list(reader.advance(500)) == []
    assert not reader.unfinished


@settings(deadline=None, max_examples=300)
@given(
    noise=st.binary(max_size=400),
    valid=st.booleans(),
    kind=st.integers(0, 9),
    length=st.integers(0, 2**32 - 1),
    piece=st.integers(1, 500),
)
def test_random_bytes_raise_a_protocol_error_and_allocate_nothing_above_the_limit(
    noise: bytes, valid: bool, kind: int, length: int, piece: int
) -> None:
    allocated = 0

    def count(size: int) -> memoryview:
        nonlocal allocated
        allocated += size
        assert allocated <= SMALL.message, "more was allocated than the limit allows"
        return allocate(size)

    receiver = Receiver(Assembler(SMALL, count))
    reader = receiver.connect(SMALL)
    # Half of the time after a valid header, so that the noise gets further.
    stream = (pack_header(kind, length if length % 2 else length % 300, 1, 0, 0) if valid else b"") + noise
    try:
        for frame in feed(reader, stream, cycle(piece)):
            assert len(frame.body) <= SMALL.frame
            receiver.handle(frame)
    except ProtocolError:
        return
    assert len(reader.buffer()) <= max(FrameReader.SCRATCH, SMALL.frame)


@pytest.mark.parametrize("kind", [MESSAGE, BULK_HEAD, BULK_CHUNK, Kind.PING])
def test_a_frame_above_the_limit_is_refused_before_its_body_is_read(kind: int) -> None:
    reader = Receiver().connect(SMALL)
    with pytest.raises(LimitExceeded, match="a frame of 200,001 bytes; the limit is 200,000"):
        read_all(reader, pack_header(kind, SMALL.frame + 1, 1, 0, 0))


@pytest.mark.parametrize("kind", [kind for kind in Kind if kind != Kind.HANDSHAKE])
def test_an_unauthenticated_peer_may_send_only_a_handshake(kind: int) -> None:
    with pytest.raises(ProtocolError, match="before the handshake"):
        read_all(FrameReader(HANDSHAKE_LIMITS), pack_header(kind, 0, 0, 0, 0))


@pytest.mark.parametrize("first", [b"G", b"GET / HTTP/1.1", b"tG"])
def test_another_protocol_is_recognized_by_its_first_bytes(first: bytes) -> None:
    with pytest.raises(ProtocolError, match="not a telegrad frame"):
        read_all(FrameReader(HANDSHAKE_LIMITS), first)


def test_an_unauthenticated_peer_gets_a_small_buffer() -> None:
    assert len(FrameReader(HANDSHAKE_LIMITS).buffer()) <= 3 * HANDSHAKE_LIMITS.frame


@pytest.mark.parametrize("piece", [1, 100, 2080])
def test_bytes_after_the_handshake_are_kept_when_the_peer_is_admitted(piece: int) -> None:
    receiver = Receiver()
    reader = FrameReader(HANDSHAKE_LIMITS)
    stream = pack_header(Kind.HANDSHAKE, 1000, 0, 0, 0) + bytes(1000) + stream_of((b"early", b"d" * 500, b""))
    rest = memoryview(stream)
    while reader.only_handshake:
        buffer = reader.buffer()
        count = min(len(buffer), len(rest), piece)
        buffer[:count], rest = rest[:count], rest[count:]
        for frame in reader.advance(count):
            assert frame.kind == Kind.HANDSHAKE
            reader.admit(Limits(), receiver.destination)
            break
    for frame in reader.advance(0):
        receiver.handle(frame)
    for frame in feed(reader, bytes(rest), cycle(piece)):
        receiver.handle(frame)
    assert receiver.messages == [(b"early", b"d" * 500, b"")]


def test_a_handshake_message_is_limited_in_size() -> None:
    reader = FrameReader(HANDSHAKE_LIMITS)
    assert len(read_all(reader, pack_header(Kind.HANDSHAKE, 2048, 0, 0, 0) + bytes(2048))) == 1
    with pytest.raises(LimitExceeded):
        read_all(reader, pack_header(Kind.HANDSHAKE, 2049, 0, 0, 0))


def test_an_error_is_raised_again_when_reading_continues() -> None:
    reader = Receiver().connect()
    reader.buffer()[:HEADER_SIZE] = bytes(HEADER_SIZE)
    for count in (HEADER_SIZE, 0, 0):
        with pytest.raises(ProtocolError):
            list(reader.advance(count))
        assert reader.unfinished


# -- a read that returned one small message


def single(reader: FrameReader, read: bytes) -> Frame | None:
    reader.buffer()[: len(read)] = read
    return reader.take_single(len(read))


def test_a_read_of_exactly_one_message_is_taken_without_advancing() -> None:
    reader = Receiver().connect()
    for number in range(3):
        frame = single(reader, stream_of((b"%d" % number, b"data", b"region")))
        assert frame is not None
        assert (frame.kind, frame.sequence, frame.ack_control, frame.ack_bulk) == (MESSAGE, 1, 3, 4)
        assert bytes(frame.body[16:17]) == b"%d" % number
    assert not reader.unfinished


message = stream_of((b"head", b"", b""))


@pytest.mark.parametrize(
    "read",
    [
        message[: HEADER_SIZE - 1],
        message[:-1],
        message + message[:5],
        pack_header(Kind.ACK, 0, 0, 0, 0),
        b"xx" + message[2:],
        message[:2] + b"\xff" + message[3:],
    ],
    ids=["part of a header", "part of a body", "more", "another kind", "another protocol", "another version"],
)
def test_any_other_read_is_left_to_advance(read: bytes) -> None:
    reader, other = Receiver().connect(), Receiver().connect()
    assert single(reader, read) is None
    other.buffer()[: len(read)] = read
    outcomes = []
    for each in (reader, other):
        try:
            outcomes.append(list(each.advance(len(read))))
        except ProtocolError as error:
            outcomes.append([str(error)])
    assert outcomes[0] == outcomes[1]


def test_a_message_is_not_single_while_another_frame_is_incomplete_or_the_peer_unauthenticated() -> None:
    reader = Receiver().connect()
    reader.buffer()[:10] = message[:10]
    assert list(reader.advance(10)) == []
    assert single(reader, message[10:]) is None
    assert single(FrameReader(HANDSHAKE_LIMITS), message) is None
    large = Receiver()
    reader = large.connect()
    stream = stream_of((b"large", b"", b"r" * CHUNK))
    reader.buffer()[:1000] = stream[:1000]
    for frame in reader.advance(1000):
        large.handle(frame)
    assert single(reader, message) is None


def test_a_message_inside_a_body_that_is_discarded_is_not_read() -> None:
    """Whoever chooses the contents of a refused message could send messages in the name of its sender."""
    forged = pack_header(MESSAGE, 5, 99, 0, 0) + b"forge"
    reader = FrameReader(HANDSHAKE_LIMITS)
    reader.admit(SMALL, lambda sequence, length: None)
    header = pack_header(BULK_CHUNK, 2 * len(forged), 1, 0, 0)
    reader.buffer()[: len(header)] = header
    assert list(reader.advance(len(header))) == []
    assert single(reader, forged) is None
    assert list(reader.advance(len(forged))) == []
    assert single(reader, forged) is None
    (frame,) = reader.advance(len(forged))
    assert isinstance(frame, TruncatedFrame)
    assert frame.kind == BULK_CHUNK


def test_a_message_above_the_limit_is_not_single() -> None:
    reader = Receiver().connect(Limits(frame=3))
    assert single(reader, message) is None
    with pytest.raises(LimitExceeded):
        list(reader.advance(len(message)))


# -- memory


def test_a_reader_keeps_little_memory_after_large_messages() -> None:
    receiver = Receiver()
    reader = receiver.connect()
    sent = [(b"%05d" % number, b"d" * size, b"") for number, size in enumerate((10, 60_000, 60_000, 10))]
    for frame in feed(reader, stream_of(*sent), cycle(1 << 20)):
        receiver.handle(frame)
    assert receiver.messages == sent
    assert len(reader.buffer()) <= 8 * 1024


def test_a_reader_keeps_memory_for_medium_messages_while_they_come() -> None:
    reader = Receiver().connect()

    def read(data: bytes) -> int:
        """Return how many reads a message takes."""
        stream, frames, reads = stream_of((b"head", data, b"")), [], 0
        while stream:
            buffer, reads = reader.buffer(), reads + 1
            count = min(len(buffer), len(stream))
            buffer[:count], stream = stream[:count], stream[count:]
            single = reader.take_single(count)
            frames += reader.advance(count) if single is None else [single]
        assert [bytes(frame.body[-len(data) :]) for frame in frames] == [data]
        return reads

    assert [read(b"d" * 16_000) for _ in range(3)] == [2, 1, 1]
    assert len(reader.buffer()) <= 24 * 1024
    assert {read(b"d") for _ in range(20)} == {1}
    assert len(reader.buffer()) <= 8 * 1024
    assert read(b"d" * 16_000) == 2


def test_a_body_without_memory_is_truncated_and_the_next_frame_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(length: int) -> bytearray:
        raise MemoryError

    reader = Receiver().connect()
    body = bytes(range(256)) * 800
    stream = pack_header(MESSAGE, len(body), 1, 0, 0) + body + message
    frames = []
    rest = memoryview(stream)
    with monkeypatch.context() as patch:
        patch.setattr(frame_reader, "bytearray", no_memory, raising=False)
        count = len(reader.buffer())
        reader.buffer()[:] = rest[:count]
        frames += list(reader.advance(count))
    frames += list(feed(reader, bytes(rest[count:]), cycle(10_000)))
    truncated, whole = frames
    assert type(truncated) is TruncatedFrame
    assert bytes(truncated.body) == body[:256]
    assert bytes(whole.body) == message[HEADER_SIZE:]


@pytest.mark.parametrize("piece", [100, 65_536])
def test_a_chunk_without_a_destination_is_read_and_discarded(piece: int) -> None:
    reader = FrameReader(HANDSHAKE_LIMITS)
    assert reader.destination(1, 10) is None
    reader.admit(Limits(), lambda sequence, length: None)
    chunk, other = read_all(reader, pack_header(BULK_CHUNK, 3000, 1, 0, 0) + b"c" * 3000 + message, piece)
    assert type(chunk) is TruncatedFrame
    assert set(bytes(chunk.body)) <= set(b"c")
    assert bytes(other.body) == message[HEADER_SIZE:]


def test_a_chunk_that_is_read_at_once_is_copied_to_its_destination() -> None:
    reader = FrameReader(HANDSHAKE_LIMITS)
    buffer = bytearray(3000)
    reader.admit(Limits(), lambda sequence, length: memoryview(buffer))
    chunk, other = read_all(reader, pack_header(BULK_CHUNK, 3000, 1, 0, 0) + b"c" * 3000 + message, 65_536)
    assert (chunk.kind, bytes(chunk.body), bytes(buffer)) == (BULK_CHUNK, b"c" * 3000, b"c" * 3000)
    assert bytes(other.body) == message[HEADER_SIZE:]


def test_the_buffer_is_compacted_when_most_of_it_was_read() -> None:
    receiver = Receiver()
    reader = receiver.connect()
    sent = [(b"%05d" % number, b"d" * 40_000, b"") for number in range(20)]
    for frame in feed(reader, stream_of(*sent), cycle(FrameReader.SCRATCH)):
        receiver.handle(frame)
    assert receiver.messages == sent


def test_a_frame_that_is_larger_than_what_is_stored_is_read_and_discarded() -> None:
    reader = FrameReader(HANDSHAKE_LIMITS)
    reader.admit(StoredLimits(10_000_000, 10_000_000, stored=200_000), lambda sequence, length: None)
    stream = b"".join(
        pack_header(MESSAGE, size, number, 0, 0) + bytes([number]) * size
        for number, size in enumerate((150_000, 300_000, 10), 1)
    )
    kinds = []
    rest = memoryview(stream)
    while rest:
        buffer = reader.buffer()
        count = min(len(buffer), len(rest))
        buffer[:count] = rest[:count]
        rest = rest[count:]
        kinds += [(type(frame), frame.sequence, len(frame.body)) for frame in reader.advance(count)]
    assert kinds == [(Frame, 1, 150_000), (TruncatedFrame, 2, TRUNCATED_SIZE), (Frame, 3, 10)]


def test_without_memory_for_a_larger_buffer_the_one_that_is_there_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    failed: list[int] = []

    def allocate_small(size: int) -> bytearray:
        if size == FrameReader.LARGE:
            failed.append(size)
            raise MemoryError
        return bytearray(size)

    monkeypatch.setattr(frame_reader, "bytearray", allocate_small, raising=False)
    receiver = Receiver()
    sent = [(b"head", b"d" * 10_000, b"")] * 3
    for frame in feed(receiver.connect(), stream_of(*sent), cycle(FrameReader.SCRATCH)):
        receiver.handle(frame)
    assert receiver.messages == sent
    assert failed
