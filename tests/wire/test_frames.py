"""Frames: any message, cut in any way, comes out as it went in; anything else is an error and takes no memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from telegrad.errors import LimitExceeded, OtherVersion, ProtocolError
from telegrad.wire.frame_reader import FrameReader
from telegrad.wire.frames import (
    BULK,
    BULK_CHUNK,
    BULK_HEAD,
    CHUNK,
    CONTROL,
    HANDSHAKE_LIMITS,
    HEADER_SIZE,
    INLINE_LIMIT,
    MESSAGE,
    PREFIX_SIZE,
    VERSION,
    Frame,
    Kind,
    Limits,
    Message,
    check_header,
    lane_of,
    pack_header,
    pack_ping,
    unpack_ping,
)
from telegrad.wire.packing import OutgoingFrame, message_size, pack
from telegrad.wire.reassembly import Assembler

SMALL = Limits(frame=200_000, message=300_000)


def allocate(size: int) -> memoryview:
    return memoryview(bytearray(size))


class Contents:
    """A region, of which a copy can be had or not."""

    def __init__(self, contents: bytes | bytearray, copied: bool) -> None:
        self.contents = contents
        self.size = len(contents)
        self.copied = copied

    def write(self, view: memoryview) -> None:
        view[:] = self.contents

    def copy(self) -> bytes | None:
        return bytes(self.contents) if self.copied else None


def frames_of(head: bytes, data: bytes, region: bytes, copied: bool = False) -> tuple[OutgoingFrame, ...]:
    return pack(head, data, Contents(region, copied) if region else None, allocate)


def parts(message: Message) -> tuple[bytes, bytes, bytes]:
    return bytes(message.head), bytes(message.data), bytes(message.region)


def take(assembler: Assembler, frame: Frame) -> Message | None:
    """What a session does with a frame that it lets through."""
    return assembler.read(frame) or assembler.add(frame)


@dataclass
class Receiver:
    """A session's receiving side in small: it counts bulk frames, drops what came before, and assembles messages."""

    assembler: Assembler = field(default_factory=lambda: Assembler(Limits(), allocate))
    received: dict[int, int] = field(default_factory=lambda: {CONTROL: 0, BULK: 0})
    messages: list[tuple[bytes, bytes, bytes]] = field(default_factory=list)
    placed: list[int] = field(default_factory=list)

    def place(self, sequence: int, length: int) -> memoryview | None:
        if sequence != self.received[BULK] + 1:
            return None
        self.placed.append(sequence)
        return self.assembler.destination(length)

    def connect(self, limits: Limits | None = None) -> FrameReader:
        reader = FrameReader(HANDSHAKE_LIMITS)
        reader.admit(limits or Limits(), self.place)
        return reader

    def take(self, frame: Frame) -> None:
        message = self.assembler.read(frame)
        lane = lane_of(frame.kind)
        if frame.sequence <= self.received[lane]:
            return
        self.received[lane] = frame.sequence
        if message is None:
            message = self.assembler.add(frame)
        if message is not None:
            self.messages.append(parts(message))

    def take_all(self, stream: bytes) -> None:
        """Read a connection from its first to its last byte."""
        for frame in feed(self.connect(), stream, forever(65_536)):
            self.take(frame)


def stream_of(*messages: tuple[bytes, bytes, bytes]) -> bytes:
    sequences = {CONTROL: 0, BULK: 0}
    stream = bytearray()
    for message in messages:
        for kind, body, _ in frames_of(*message):
            sequences[lane_of(kind)] += 1
            stream += pack_header(kind, len(body), sequences[lane_of(kind)], 3, 4) + bytes(body)
    return bytes(stream)


def feed(reader: FrameReader, stream: bytes, cuts: Iterator[int]) -> Iterator[Frame]:
    """Write `stream` into the reader in pieces of the given sizes, as a socket would."""
    rest = memoryview(stream)
    while rest:
        buffer = reader.buffer()
        assert len(buffer) > 0, "a reader without room would look like the end of the stream"
        count = min(len(buffer), len(rest), next(cuts))
        buffer[:count] = rest[:count]
        rest = rest[count:]
        yield from reader.advance(count)


def forever(*sizes: int) -> Iterator[int]:
    while True:
        yield from sizes


sizes = st.one_of(st.integers(0, 200), st.integers(INLINE_LIMIT - 200, INLINE_LIMIT + 200), st.just(CHUNK + 17))
pieces = st.lists(st.one_of(st.integers(1, 40), st.integers(1, 200_000)), min_size=1, max_size=8)


PATTERN = bytes(range(251)) * 4200


@st.composite
def messages(draw: st.DrawFn) -> tuple[bytes, bytes, bytes]:
    start = draw(st.integers(0, 250))
    head, data, region = (PATTERN[start + part : start + part + draw(sizes)] for part in range(3))
    return head, data, region


# -- there and back -------------------------------------------------------------------------------------------


@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])  # a loaded machine is slow, not the test
@given(sent=st.lists(messages(), max_size=5), cuts=pieces)
def test_any_messages_cut_in_any_way_come_out_unchanged(
    sent: list[tuple[bytes, bytes, bytes]], cuts: list[int]
) -> None:
    receiver = Receiver()
    for frame in feed(receiver.connect(), stream_of(*sent), forever(*cuts)):
        assert (frame.ack_control, frame.ack_bulk) == (3, 4)
        receiver.take(frame)
    assert receiver.messages == sent


@pytest.mark.parametrize("size", [1, HEADER_SIZE - 1, HEADER_SIZE, HEADER_SIZE + 1, 4096, 10**7])
def test_pieces_of_every_awkward_size_are_put_together(size: int) -> None:
    sent = [(b"head", b"data", b""), (b"h" * 100, b"d" * 2000, b"r" * 70_000), (b"", b"", b""), (b"h", b"", b"r" * 32)]
    receiver = Receiver()
    for frame in feed(receiver.connect(), stream_of(*sent), forever(size)):
        receiver.take(frame)
    assert receiver.messages == sent


@given(head=st.integers(0, 300), data=st.integers(0, 300), region=st.integers(0, 300))
def test_the_region_starts_at_a_multiple_of_sixteen(head: int, data: int, region: int) -> None:
    (frame,) = frames_of(b"h" * head, b"d" * data, b"r" * region)
    if region:
        assert (len(frame.body) - region) % 16 == 0
        assert len(frame.body) == message_size(b"h" * head, b"d" * data, region)


def test_a_message_up_to_the_limit_is_one_frame_and_one_beyond_it_is_chunks() -> None:
    fits = INLINE_LIMIT - PREFIX_SIZE
    assert [frame.kind for frame in frames_of(b"", b"d" * fits, b"")] == [MESSAGE]
    assert [frame.kind for frame in frames_of(b"", b"d" * (fits + 1), b"")] == [BULK_HEAD, BULK_CHUNK]


@pytest.mark.parametrize("chunks", [(CHUNK, CHUNK), (CHUNK, CHUNK + 1), (CHUNK, CHUNK, CHUNK - 1), (100_000,)])
def test_a_small_remainder_is_added_to_the_last_chunk(chunks: tuple[int, ...]) -> None:
    large = frames_of(b"h", b"", b"r" * sum(chunks))
    assert [len(frame.body) for frame in large] == [PREFIX_SIZE + 1, *chunks]


def test_a_message_that_is_all_head_is_complete_without_a_chunk() -> None:
    head = b"h" * (INLINE_LIMIT + 1)
    (frame,) = frames_of(head, b"", b"")
    message = take(Assembler(Limits(), allocate), Frame(frame.kind, 1, 0, 0, frame.body))
    assert message is not None
    assert parts(message) == (head, b"", b"")


@given(st.binary(max_size=40), st.binary(max_size=40), st.binary(min_size=1, max_size=40))
def test_a_region_that_is_copied_arrives_as_one_that_is_written(head: bytes, data: bytes, region: bytes) -> None:
    (copied,), (written,) = frames_of(head, data, region, copied=True), frames_of(head, data, region)
    assert bytes(copied.body) == bytes(written.body)


@pytest.mark.parametrize("size", [100, 3 * CHUNK])
@pytest.mark.parametrize("copied", [False, True])
def test_what_was_packed_is_a_snapshot(size: int, copied: bool) -> None:
    region = bytearray(b"r" * size)
    frames = pack(b"", b"", Contents(region, copied), allocate)
    region[:] = b"x" * size
    assert all(b"x" not in bytes(frame.body) for frame in frames)


def test_a_small_message_passes_between_the_chunks_of_a_large_one() -> None:
    large = frames_of(b"large", b"", b"r" * (3 * CHUNK))
    (small,) = frames_of(b"small", b"", b"")
    stream = bytearray()
    for number, (kind, body, _) in enumerate(large, start=1):
        stream += pack_header(kind, len(body), number, 0, 0) + bytes(body)
        stream += pack_header(small.kind, len(small.body), number, 0, 0) + bytes(small.body)
    receiver = Receiver()
    for frame in feed(receiver.connect(), bytes(stream), forever(100_000, 7)):
        receiver.take(frame)
    assert [head for head, _, _ in receiver.messages] == [b"small"] * 3 + [b"large", b"small"]


def test_chunks_are_read_straight_into_the_place_that_the_assembler_names() -> None:
    taken: list[memoryview] = []

    def note(size: int) -> memoryview:
        taken.append(allocate(size))
        return taken[-1]

    receiver = Receiver(Assembler(Limits(), note))
    for frame in feed(receiver.connect(), stream_of((b"h", b"d", b"r" * (2 * CHUNK))), forever(50_000)):
        if frame.kind == BULK_CHUNK:
            assert isinstance(frame.body, memoryview)
            assert frame.body.obj is taken[0].obj
        receiver.take(frame)
    assert len(taken) == 1
    assert receiver.messages == [(b"h", b"d", b"r" * (2 * CHUNK))]


# -- connections break ----------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=60)
@given(where=st.floats(0, 1), piece=st.integers(300, 300_000))
def test_a_message_that_a_broken_connection_cut_goes_on_over_the_next_one(where: float, piece: int) -> None:
    sent = [(b"first", b"", b""), (b"large", b"data", bytes(range(256)) * (3 * CHUNK // 256)), (b"last", b"", b"")]
    stream = stream_of(*sent)
    receiver = Receiver()
    for frame in feed(receiver.connect(), stream[: int(where * len(stream))], forever(piece)):
        receiver.take(frame)
    # The sender does not know what arrived, and sends all of it again.
    for frame in feed(receiver.connect(), stream, forever(piece)):
        receiver.take(frame)
    assert receiver.messages == sent


def test_half_a_chunk_is_written_again_at_the_same_place() -> None:
    region = bytes(range(256)) * (2 * CHUNK // 256)
    frames = frames_of(b"h", b"", region)
    stream = [pack_header(kind, len(body), n, 0, 0) + bytes(body) for n, (kind, body, _) in enumerate(frames, start=1)]
    receiver = Receiver()
    for frame in feed(receiver.connect(), b"".join([*stream[:2], stream[2][: CHUNK // 2]]), forever(65_536)):
        receiver.take(frame)
    assert receiver.received[BULK] == 2
    assert receiver.placed == [2, 3]
    for frame in feed(receiver.connect(), b"".join(stream[2:]), forever(65_536)):
        receiver.take(frame)
    assert receiver.placed == [2, 3, 3]
    assert receiver.messages == [(b"h", b"", region)]


def test_a_chunk_that_came_before_is_read_and_thrown_away() -> None:
    sent = (b"h", b"", b"r" * CHUNK + b"s" * CHUNK)
    stream = stream_of(sent)
    receiver = Receiver()
    reader = receiver.connect()
    for frame in feed(reader, stream + stream, forever(100_000)):
        receiver.take(frame)
    assert receiver.messages == [sent]
    assert receiver.placed == [2, 3]


# -- taking some of the frames --------------------------------------------------------------------------------


def test_frames_that_were_not_taken_are_still_there() -> None:
    stream = stream_of(*[(b"%d" % number, b"", b"") for number in range(5)])
    receiver = Receiver()
    reader = receiver.connect()
    reader.buffer()[: len(stream)] = stream
    assert not reader.unfinished
    receiver.take(next(reader.advance(len(stream))))
    assert reader.unfinished
    receiver.take(next(reader.advance(0)))
    assert reader.unfinished
    for frame in reader.advance(0):
        receiver.take(frame)
    assert not reader.unfinished
    assert [head for head, _, _ in receiver.messages] == [b"0", b"1", b"2", b"3", b"4"]


@settings(deadline=None)
@given(counts=st.lists(st.integers(1, 3), min_size=1), cut=st.integers(1, 500))
def test_stopping_anywhere_loses_nothing(counts: list[int], cut: int) -> None:
    sent = [(b"%d" % number, b"d" * (13 * number), b"r" * number) for number in range(30)]
    rest = memoryview(stream_of(*sent))
    receiver = Receiver()
    reader = receiver.connect()
    turns = forever(*counts)
    while rest or reader.unfinished:
        if reader.unfinished:
            frames = reader.advance(0)
        else:
            buffer = reader.buffer()
            count = min(cut, len(buffer), len(rest))
            buffer[:count], rest = rest[:count], rest[count:]
            frames = reader.advance(count)
        for _, frame in zip(range(next(turns)), frames, strict=False):
            receiver.take(frame)
        frames.close()  # type: ignore[attr-defined]  # advance is a generator
    assert receiver.messages == sent


def test_a_reader_in_the_middle_of_a_frame_is_not_unfinished() -> None:
    stream = stream_of((b"h" * 1000, b"", b""))
    reader = Receiver().connect()
    reader.buffer()[:500] = stream[:500]
    assert list(reader.advance(500)) == []
    assert not reader.unfinished


# -- what must not come ---------------------------------------------------------------------------------------


def read_all(reader: FrameReader, stream: bytes, piece: int = 65_536) -> list[Frame]:
    return list(feed(reader, stream, forever(piece)))


@settings(deadline=None, max_examples=300)
@given(
    noise=st.binary(max_size=400),
    valid=st.booleans(),
    kind=st.integers(0, 9),
    length=st.integers(0, 2**32 - 1),
    piece=st.integers(1, 500),
)
def test_noise_is_a_protocol_error_or_waits_for_more_and_takes_no_memory(
    noise: bytes, valid: bool, kind: int, length: int, piece: int
) -> None:
    taken = 0

    def count(size: int) -> memoryview:
        nonlocal taken
        taken += size
        assert taken <= SMALL.message, "more was taken than the limit allows"
        return allocate(size)

    receiver = Receiver(Assembler(SMALL, count))
    reader = receiver.connect(SMALL)
    # Half of the time behind a header that could be one, so that the noise gets further.
    stream = (pack_header(kind, length if length % 2 else length % 300, 1, 0, 0) if valid else b"") + noise
    try:
        for frame in feed(reader, stream, forever(piece)):
            assert len(frame.body) <= SMALL.frame
            receiver.take(frame)
    except ProtocolError:
        return
    assert len(reader.buffer()) <= max(FrameReader.SCRATCH, SMALL.frame)


@given(header=st.binary(min_size=HEADER_SIZE, max_size=HEADER_SIZE))
def test_a_header_of_noise_is_a_protocol_error(header: bytes) -> None:
    if header[:2] == b"tg":
        return
    with pytest.raises(ProtocolError, match="not a telegrad frame"):
        check_header(header, 0, Limits())


def test_another_version_is_named() -> None:
    header = bytearray(pack_header(MESSAGE, 0, 1, 0, 0))
    header[2] = VERSION + 1
    with pytest.raises(OtherVersion, match=f"version {VERSION + 1}, this worker speaks {VERSION}"):
        check_header(header, 0, Limits())


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ProtocolError, match="unknown kind 99"):
        check_header(pack_header(99, 0, 1, 0, 0), 0, Limits())


@pytest.mark.parametrize("kind", [MESSAGE, BULK_HEAD, BULK_CHUNK, Kind.PING])
def test_a_frame_beyond_the_limit_is_refused_before_its_body_comes(kind: int) -> None:
    reader = Receiver().connect(SMALL)
    with pytest.raises(LimitExceeded, match="a frame of 200,001 bytes; the limit is 200,000"):
        read_all(reader, pack_header(kind, SMALL.frame + 1, 1, 0, 0))


@pytest.mark.parametrize("kind", [kind for kind in Kind if kind != Kind.HANDSHAKE])
def test_a_stranger_may_send_nothing_but_a_handshake(kind: int) -> None:
    with pytest.raises(ProtocolError, match="before the handshake"):
        read_all(FrameReader(HANDSHAKE_LIMITS), pack_header(kind, 0, 0, 0, 0))


@pytest.mark.parametrize("first", [b"G", b"GET / HTTP/1.1", b"tG"])
def test_another_protocol_is_recognized_by_its_first_bytes(first: bytes) -> None:
    with pytest.raises(ProtocolError, match="not a telegrad frame"):
        read_all(FrameReader(HANDSHAKE_LIMITS), first)


def test_little_is_read_and_held_for_a_stranger() -> None:
    assert len(FrameReader(HANDSHAKE_LIMITS).buffer()) <= 3 * HANDSHAKE_LIMITS.frame


@pytest.mark.parametrize("piece", [1, 100, 2080])
def test_what_came_with_the_last_greeting_is_not_lost_when_the_peer_is_admitted(piece: int) -> None:
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
            reader.admit(Limits(), receiver.place)
            break
    for frame in reader.advance(0):
        receiver.take(frame)
    for frame in feed(reader, bytes(rest), forever(piece)):
        receiver.take(frame)
    assert receiver.messages == [(b"early", b"d" * 500, b"")]


def test_a_strangers_handshake_is_short() -> None:
    reader = FrameReader(HANDSHAKE_LIMITS)
    assert len(read_all(reader, pack_header(Kind.HANDSHAKE, 2048, 0, 0, 0) + bytes(2048))) == 1
    with pytest.raises(LimitExceeded):
        read_all(reader, pack_header(Kind.HANDSHAKE, 2049, 0, 0, 0))


def test_an_error_is_raised_again_when_reading_goes_on() -> None:
    reader = Receiver().connect()
    reader.buffer()[:HEADER_SIZE] = bytes(HEADER_SIZE)
    for count in (HEADER_SIZE, 0, 0):
        with pytest.raises(ProtocolError):
            list(reader.advance(count))
        assert reader.unfinished


def never(size: int) -> memoryview:
    raise AssertionError(f"{size} bytes were taken for a message that must be refused")


@pytest.mark.parametrize("kind", [MESSAGE, BULK_HEAD])
@pytest.mark.parametrize(("data", "region"), [(300_001, 0), (0, 300_001), (299_999, 2), (2**32 - 1, 2**64 - 1)])
def test_a_message_beyond_the_limit_takes_no_memory(kind: int, data: int, region: int) -> None:
    body = (0).to_bytes(4, "little") + data.to_bytes(4, "little") + region.to_bytes(8, "little")
    with pytest.raises(LimitExceeded, match="the limit is 300,000"):
        take(Assembler(SMALL, never), Frame(kind, 1, 0, 0, body))


@pytest.mark.parametrize(
    ("head", "data", "region"), [(5, 0, 0), (3, 0, 0), (4, 1, 0), (4, 0, 1), (2**32 - 1, 0, 0), (0, 0, 5)]
)
def test_lengths_that_do_not_add_up_to_the_frame_are_refused(head: int, data: int, region: int) -> None:
    prefix = head.to_bytes(4, "little") + data.to_bytes(4, "little") + region.to_bytes(8, "little")
    for kind in (MESSAGE, BULK_HEAD) if not (data or region) else (MESSAGE,):
        with pytest.raises(ProtocolError):
            take(Assembler(Limits(), never), Frame(kind, 1, 0, 0, prefix + b"four"))


@pytest.mark.parametrize("size", range(PREFIX_SIZE))
@pytest.mark.parametrize("kind", [MESSAGE, BULK_HEAD])
def test_a_message_shorter_than_its_prefix_is_refused(kind: int, size: int) -> None:
    with pytest.raises(ProtocolError, match="shorter than its prefix"):
        take(Assembler(Limits(), never), Frame(kind, 1, 0, 0, bytes(size)))


def test_a_chunk_without_a_message_is_refused() -> None:
    receiver = Receiver()
    with pytest.raises(ProtocolError, match="without a BULK_HEAD"):
        read_all(receiver.connect(), pack_header(BULK_CHUNK, 10, 1, 0, 0) + bytes(10))
    with pytest.raises(ProtocolError, match="without a BULK_HEAD"):
        take(Assembler(Limits(), never), Frame(BULK_CHUNK, 1, 0, 0, b"x"))


@pytest.mark.parametrize("length", [0, 1, CHUNK - 1])
def test_a_chunk_smaller_than_what_is_due_is_refused(length: int) -> None:
    receiver = Receiver()
    head = frames_of(b"h", b"", b"r" * (2 * CHUNK))[0]
    stream = pack_header(head.kind, len(head.body), 1, 0, 0) + bytes(head.body)
    with pytest.raises(ProtocolError, match="where one of 524,288 is due"):
        receiver.take_all(stream + pack_header(BULK_CHUNK, length, 2, 0, 0))


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


def test_a_chunk_after_the_last_of_its_message_is_refused() -> None:
    receiver = Receiver()
    stream = stream_of((b"h", b"", b"r" * CHUNK)) + pack_header(BULK_CHUNK, 1, 3, 0, 0) + b"x"
    with pytest.raises(ProtocolError, match="without a BULK_HEAD"):
        receiver.take_all(stream)
    assert len(receiver.messages) == 1


def test_a_chunk_larger_than_what_is_due_is_refused() -> None:
    receiver = Receiver()
    head, chunk = frames_of(b"h", b"", b"r" * (INLINE_LIMIT + 1))
    stream = pack_header(head.kind, len(head.body), 1, 0, 0) + bytes(head.body)
    stream += pack_header(chunk.kind, len(chunk.body) + 1, 2, 0, 0)
    with pytest.raises(ProtocolError, match="a BULK_CHUNK of 65,538 bytes where one of 65,537 is due"):
        receiver.take_all(stream)


def test_a_large_message_inside_another_is_refused() -> None:
    assembler = Assembler(Limits(), allocate)
    head, _ = frames_of(b"h", b"", b"r" * (INLINE_LIMIT + 1))
    assert take(assembler, Frame(head.kind, 1, 0, 0, head.body)) is None
    with pytest.raises(ProtocolError, match="in the middle of another"):
        take(assembler, Frame(head.kind, 2, 0, 0, head.body))


@pytest.mark.parametrize("kind", [Kind.HANDSHAKE, Kind.ACK, Kind.PING, Kind.GOODBYE])
def test_frames_that_carry_no_message_are_refused_by_the_assembler(kind: int) -> None:
    with pytest.raises(ProtocolError, match="not part of a message"):
        take(Assembler(Limits(), never), Frame(kind, 1, 0, 0, b""))


# -- pings ----------------------------------------------------------------------------------------------------


@given(control=st.integers(0, 2**64 - 1), bulk=st.integers(0, 2**64 - 1))
def test_a_ping_says_what_was_sent(control: int, bulk: int) -> None:
    assert unpack_ping(pack_ping(control, bulk)) == (control, bulk)


@given(body=st.binary(max_size=40))
def test_a_ping_of_another_size_is_refused(body: bytes) -> None:
    if len(body) == 16:
        assert all(number >= 0 for number in unpack_ping(body))
    else:
        with pytest.raises(ProtocolError, match="a PING of"):
            unpack_ping(body)


def test_bulk_has_a_lane_of_its_own() -> None:
    assert {kind for kind in Kind if lane_of(kind) == BULK} == {Kind.BULK_HEAD, Kind.BULK_CHUNK}
