"""What a launcher and the runners of its workers say to each other: frames of a length and a MessagePack body."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Annotated, Final

import msgspec

from telegrad.errors import ProtocolError

_LENGTH = struct.Struct(">Q")
MAX_FRAME = 1 << 40
"""Bytes. Both sides trust each other, but not what else may connect: see `MAX_HELLO`."""
MAX_HELLO: Final = 4096
"""Bytes of the first frame of a runner, which is not trusted yet."""
STDOUT, STDERR, RESULT = 1, 2, 3
MARK: Final = b"\0telegrad-runner\n"
"""What a runner writes before its first frame where a login shell may have written something before it, as with ssh."""
_PART = 1 << 20


class Hello(msgspec.Struct, tag=True, frozen=True):
    """From a runner, first: who it is."""

    rank: int
    host: str
    """Equal for runners that share a loopback interface."""
    address: str = ""
    """An address of the host that other hosts reach; empty: the one that the launcher sees."""
    restart: int = 0
    key: str = ""
    """Proves that the launcher has started it; empty if the connection itself does, as with ssh."""
    size: int = 0
    """How many workers its engine has started; 0: it does not say."""


class HostStore(msgspec.Struct, tag=True, frozen=True):
    """To the runner of rank 0: host the rendezvous store of the group."""

    local: bool
    """Whether all workers run on this host."""
    ports: str = ""
    """Those that it may listen on, as in TELEGRAD_PORTS; empty: those of its own environment."""


class StoreHosted(msgspec.Struct, tag=True, frozen=True):
    """From that runner: at which port."""

    port: int
    error: str = ""
    """Why it cannot; empty: it can."""


class WorkPart(msgspec.Struct, tag=True, frozen=True):
    """To a runner, before `Start`: the next bytes of its work."""

    data: bytes

    def __repr__(self) -> str:
        return f"WorkPart({len(self.data)} bytes)"


class Start(msgspec.Struct, tag=True, frozen=True):
    """To a runner: start the worker."""

    name: str
    rank: int
    command: list[str]
    """Arguments of the Python interpreter."""
    environment: dict[str, str]
    """Variables in addition to those of the runner."""
    token: str
    directory: str
    path: list[str]
    """The launcher's `sys.path`: modules may be there on this host, too."""
    work: bytes = b""
    """See `telegrad.launch.work`; empty for a script. It is sent in parts before, so that no copy of it is needed."""
    init: bool = True
    grace: float = 5.0

    def __repr__(self) -> str:
        return f"Start({self.name!r})"


class Signal(msgspec.Struct, tag=True, frozen=True):
    """To a runner: SIGTERM or SIGINT stop the worker, SIGKILL kills it."""

    number: int


class Output(msgspec.Struct, tag=True, frozen=True):
    """From a runner: bytes that the worker wrote to stdout, stderr, or the pipe of its result."""

    stream: Annotated[int, msgspec.Meta(ge=STDOUT, le=RESULT)]
    data: bytes


class Exited(msgspec.Struct, tag=True, frozen=True):
    """From a runner, last: the worker has ended, with its whole process group."""

    code: int


Message = Hello | HostStore | StoreHosted | WorkPart | Start | Signal | Output | Exited
_decoder = msgspec.msgpack.Decoder(Message)


def pack(message: Message) -> bytes:
    """Return the frame of a message.

    >>> list(Frames().feed(pack(Signal(9))))
    [Signal(number=9)]
    """
    body = msgspec.msgpack.encode(message)
    return _LENGTH.pack(len(body)) + body


def in_parts(start: Start) -> Iterator[Message]:
    """Yield what a runner is sent to start a worker: parts of the work, and the rest. `Parts` puts it together."""
    work = memoryview(start.work)
    for begin in range(0, len(work), _PART):
        yield WorkPart(bytes(work[begin : begin + _PART]))
    yield msgspec.structs.replace(start, work=b"")


class Parts:
    """Puts the work of a `Start` together."""

    def __init__(self) -> None:
        self._work = bytearray()

    def add(self, part: WorkPart) -> None:
        """Add the next bytes of the work."""
        self._work += part.data

    def complete(self, start: Start) -> Start:
        """Return the start with its work."""
        return msgspec.structs.replace(start, work=bytes(self._work))


class Frames:
    """Puts frames together. A frame longer than `limit` is a ProtocolError.

    With a `mark`, the frames begin behind it. What comes before is output of another program, such as a login shell.

    >>> list(Frames(mark=MARK).feed(b"Welcome!" + MARK + pack(Signal(9))))
    [Output(stream=1, data=b'Welcome!'), Signal(number=9)]
    """

    def __init__(self, limit: int = MAX_FRAME, mark: bytes = b"") -> None:
        self.limit = limit
        self._mark = mark
        self._bytes = bytearray()

    def feed(self, piece: bytes) -> Iterator[Message]:
        """Add bytes, and yield the messages that they complete."""
        self._bytes += piece
        if self._mark:
            yield from self._skip()
            if self._mark:
                return
        while len(self._bytes) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._bytes)
            if length > self.limit:
                raise ProtocolError(
                    f"a runner or its launcher sent a frame of {length} bytes; {self.limit} are allowed"
                )
            end = _LENGTH.size + length
            if len(self._bytes) < end:
                return
            body = bytes(memoryview(self._bytes)[_LENGTH.size : end])
            del self._bytes[:end]
            try:
                message = _decoder.decode(body)
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
                raise ProtocolError(f"a runner or its launcher sent a frame that cannot be read: {error}") from error
            yield message

    def _skip(self) -> Iterator[Message]:
        """Yield what precedes the mark as output."""
        found = self._bytes.find(self._mark)
        # The end of the bytes may be the beginning of the mark.
        known = found if found >= 0 else max(0, len(self._bytes) - len(self._mark) + 1)
        if known:
            yield Output(STDOUT, bytes(self._bytes[:known]))
        if found >= 0:
            known, self._mark = found + len(self._mark), b""
        del self._bytes[:known]
