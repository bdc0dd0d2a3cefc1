"""Messages as a stream of frames, and the receiving side of a session, for tests of the wire."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from telegrad.wire.frame_reader import FrameReader
from telegrad.wire.frames import BULK, CONTROL, HANDSHAKE_LIMITS, Frame, Limits, Message, lane_of, pack_header
from telegrad.wire.packing import OutgoingFrame, pack
from telegrad.wire.reassembly import Assembler


def allocate(size: int) -> memoryview:
    return memoryview(bytearray(size))


def allocate_nothing(size: int) -> memoryview:
    raise AssertionError(f"{size} bytes were allocated for a message that must be refused")


class Contents:
    """The contents of a message's tensors. `copied` is whether they can be copied at once."""

    def __init__(self, contents: bytes | bytearray, copied: bool = False) -> None:
        self._contents = contents
        self._copied = copied
        self.size = len(contents)

    def write(self, view: memoryview, /) -> None:
        view[:] = self._contents

    def copy(self) -> bytes | None:
        return bytes(self._contents) if self._copied else None


def frames_of(head: bytes, data: bytes, region: bytes, copied: bool = False) -> tuple[OutgoingFrame, ...]:
    return pack(head, data, Contents(region, copied) if region else None, allocate)


def parts(message: Message) -> tuple[bytes, bytes, bytes]:
    return bytes(message.head), bytes(message.data), bytes(message.region)


def assemble(assembler: Assembler, frame: Frame) -> Message | None:
    """Process a frame that the session accepted."""
    return assembler.read(frame) or assembler.add(frame)


@dataclass
class Receiver:
    """A minimal receiving session: it counts frames, drops duplicates, and reassembles messages."""

    assembler: Assembler = field(default_factory=lambda: Assembler(Limits(), allocate))
    received: dict[int, int] = field(default_factory=lambda: {CONTROL: 0, BULK: 0})
    messages: list[tuple[bytes, bytes, bytes]] = field(default_factory=list)
    chunks: list[int] = field(default_factory=list)
    """Sequences of the chunks that got a buffer."""

    def destination(self, sequence: int, length: int) -> memoryview | None:
        if sequence != self.received[BULK] + 1:
            return None
        self.chunks.append(sequence)
        return self.assembler.destination(length)

    def connect(self, limits: Limits | None = None) -> FrameReader:
        reader = FrameReader(HANDSHAKE_LIMITS)
        reader.admit(limits or Limits(), self.destination)
        return reader

    def handle(self, frame: Frame) -> None:
        message = self.assembler.read(frame)
        lane = lane_of(frame.kind)
        if frame.sequence <= self.received[lane]:
            return
        self.received[lane] = frame.sequence
        if message is None:
            message = self.assembler.add(frame)
        if message is not None:
            self.messages.append(parts(message))

    def handle_all(self, stream: bytes) -> None:
        """Read a connection from the first to the last byte."""
        for frame in feed(self.connect(), stream, cycle(65_536)):
            self.handle(frame)


def stream_of(*messages: tuple[bytes, bytes, bytes]) -> bytes:
    sequences = {CONTROL: 0, BULK: 0}
    stream = bytearray()
    for message in messages:
        for kind, body, _ in frames_of(*message):
            sequences[lane_of(kind)] += 1
            stream += pack_header(kind, len(body), sequences[lane_of(kind)], 3, 4) + bytes(body)
    return bytes(stream)


def feed(reader: FrameReader, stream: bytes, sizes: Iterator[int]) -> Iterator[Frame]:
    """Write `stream` into the reader in pieces of the given sizes, as a socket would."""
    rest = memoryview(stream)
    while rest:
        buffer = reader.buffer()
        assert len(buffer) > 0, "an empty buffer would look like the end of the stream"
        count = min(len(buffer), len(rest), next(sizes))
        buffer[:count] = rest[:count]
        rest = rest[count:]
        yield from reader.advance(count)


def read_all(reader: FrameReader, stream: bytes, piece: int = 65_536) -> list[Frame]:
    return list(feed(reader, stream, cycle(piece)))


def cycle(*sizes: int) -> Iterator[int]:
    while True:
        yield from sizes
