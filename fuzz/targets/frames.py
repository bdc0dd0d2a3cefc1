"""Streams of bytes: cut into frames, numbered by a session, joined into messages.

An input is a program that builds a stream: raw bytes, headers with any field wrong, and valid frames. The stream is
read twice, in different pieces. What comes out must not depend on the pieces.
"""

from __future__ import annotations

import random
from collections.abc import Iterable

from fuzz.choices import Choices
from fuzz.hostile_messages import HostileMember
from fuzz.target import Target
from telegrad.errors import PayloadError, ProtocolError
from telegrad.protocol.limits import SessionSettings
from telegrad.protocol.session import Session
from telegrad.protocol.session_events import Disposition
from telegrad.wire.frame_reader import FrameReader
from telegrad.wire.frames import (
    BULK,
    HANDSHAKE_LIMITS,
    HEADER,
    MAGIC,
    PREFIX,
    VERSION,
    Frame,
    Kind,
    Limits,
    TruncatedFrame,
    lane_of,
    next_chunk,
    unpack_goodbye,
    unpack_ping,
)
from telegrad.wire.messages import decode_head
from telegrad.wire.reassembly import Assembler, DiscardedMessage
from telegrad.wire.tensors import decode_tensors

LIMITS = Limits(frame=1 << 20, message=1 << 22)
MEMORY = 1 << 20
_member = HostileMember((1, 5), (0, 6))


def _allocate(size: int) -> memoryview:
    assert size <= LIMITS.message
    if size > MEMORY:
        raise MemoryError
    return memoryview(bytearray(size))


def _frame(kind: int, body: bytes, sequence: int, acks: tuple[int, int] = (0, 0), length: int | None = None) -> bytes:
    mask = (1 << 64) - 1
    size = (len(body) if length is None else length) & 0xFFFFFFFF
    header = HEADER.pack(MAGIC, VERSION, kind & 255, size, sequence & mask, acks[0] & mask, acks[1] & mask)
    return header + body


def _stream(choices: Choices) -> bytes:
    """Return a stream of frames, of which some are invalid."""
    made = bytearray()
    sent = [0, 0]
    while choices and len(made) < 1 << 18:
        action = choices.below(8)
        if action == 0:
            made += choices.take(choices.below(64))
            continue
        kind, body, length = int(Kind.MESSAGE), b"", None
        if action <= 2:
            body = _member.body(choices)
        elif action == 3:
            data, region = choices.below(4096), choices.pick((0, 0, 100, 70_000, 600_000, 3 << 20, 5 << 20))
            kind, body = int(Kind.BULK_HEAD), PREFIX.pack(4, data, region) + b"head"
        elif action == 4:
            kind, body = int(Kind.BULK_CHUNK), bytes(next_chunk(choices.integer(3) & 0xFFFFF))
        elif action == 5:
            kind = choices.pick([*map(int, Kind), 0, 13, 255])
            body = choices.take(choices.below(48))
        elif action == 6:
            kind, body = int(Kind.PING), sent[0].to_bytes(8, "little") + sent[1].to_bytes(8, "little")
        else:
            body, length = _member.body(choices), choices.pick((0, 15, 16, 1 << 20, (1 << 20) + 1, 0xFFFFFFFF))
        lane = lane_of(kind)
        numbered = kind in (Kind.MESSAGE, Kind.BULK_HEAD, Kind.BULK_CHUNK, Kind.SHARED_MESSAGE)
        sequence = 0
        if numbered and not choices.rarely():
            sent[lane] += 1
            sequence = sent[lane]
        elif choices.flag():
            sequence = choices.number(4)
        acks = (choices.number(2), choices.number(2)) if choices.rarely() else (0, 0)
        made += _frame(kind, body, sequence, acks, length)
    return bytes(made)


class _Receiver:
    """What a connection does with the frames that it reads."""

    def __init__(self, *, resumable: bool, admitted: bool) -> None:
        self.log: list[object] = []
        self._session = Session(resumable=resumable, initiator=False, settings=SessionSettings(), now=0.0)
        self._session.connected((0, 0), 0.0)
        self._assembler = Assembler(LIMITS, _allocate)
        self.reader = FrameReader(HANDSHAKE_LIMITS)
        if admitted:
            self.reader.admit(LIMITS, self._place)

    def _place(self, sequence: int, length: int) -> memoryview | None:
        return self._assembler.destination(length) if sequence == self._session.received_up_to()[BULK] + 1 else None

    def take(self, frame: Frame) -> None:
        kind, sequence, ack_control, ack_bulk, body = frame
        truncated = isinstance(frame, TruncatedFrame)  # how much of its body is kept depends on the pieces
        self.log.append((kind, sequence, ack_control, ack_bulk, truncated or bytes(body[:64])))
        if not sequence:
            if kind == Kind.PING:
                self._session.heard(ack_control, ack_bulk, 0.0, unpack_ping(body))
            elif kind == Kind.GOODBYE:
                unpack_goodbye(body)
            return
        message = self._assembler.read(frame)
        disposition = self._session.received(lane_of(kind), sequence, ack_control, ack_bulk, 0.0, len(body))
        if disposition is Disposition.GAP:
            raise ProtocolError("a gap")
        if disposition is not Disposition.DELIVER:
            return
        message = self._assembler.add(frame) if message is None else message
        if message is None or isinstance(message, DiscardedMessage):
            return
        self.log.append((bytes(message.head), len(message.data), len(message.region), message.size))
        head = decode_head(message.head)
        try:
            if attachments := getattr(head, "attachments", ()):
                decode_tensors(attachments, message.region)
        except (PayloadError, ProtocolError) as error:
            self.log.append(type(error))

    def read(self, stream: bytes, piece: int) -> None:
        rest = memoryview(stream)
        try:
            while rest:
                buffer = self.reader.buffer()
                assert 0 < len(buffer) <= LIMITS.frame
                count = min(len(buffer), len(rest), piece)
                buffer[:count] = rest[:count]
                rest = rest[count:]
                frame = self.reader.take_single(count)
                for found in self.reader.advance(count) if frame is None else (frame,):
                    self.take(found)
        except ProtocolError as error:
            self.log.append(type(error))


def _run(data: bytes) -> None:
    choices = Choices(data)
    resumable, admitted = choices.flag(), not choices.rarely()
    pieces = (choices.pick((1 << 20, 65_536, 4096)), 1 + choices.below(200))
    stream = _stream(choices)
    logs = []
    for piece in pieces:
        receiver = _Receiver(resumable=resumable, admitted=admitted)
        receiver.read(stream, max(piece, len(stream) // 2000))
        logs.append(receiver.log)
    if admitted:  # before the handshake, a stream is refused at its first bytes, perhaps before it has a whole header
        assert logs[0] == logs[1], f"{logs[0]} in pieces of {pieces[0]}, {logs[1]} in pieces of {pieces[1]}"


def _seeds() -> Iterable[bytes]:
    rng = random.Random(1)
    return [bytes([index & 1, 0, 0, 3]) + rng.randbytes(40 * index) for index in range(1, 24)]


FRAMES = Target("frames", _run, (), _seeds, max_size=2048)
