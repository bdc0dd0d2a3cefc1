"""The handshake, from both sides, with a peer that does not know the token: bytes, frames, messages, state machines."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from fuzz.mutators import mutate_msgpack
from fuzz.target import Target
from telegrad.connection.handshake import NONCE_SIZE, Acceptor, Opener
from telegrad.connection.worker_record import WorkerRecord
from telegrad.errors import AuthenticationError, ProtocolError, WorkerLost
from telegrad.wire.frame_reader import FrameReader
from telegrad.wire.frames import HANDSHAKE_LIMITS, Kind, pack_header
from telegrad.wire.handshake_messages import HandshakeMessage, decode_handshake

TOKEN, OTHER_TOKEN = b"the token of the group, 32 bytes", b"another group's token, 32 bytes."
A = WorkerRecord("a", 0, 5, ("tcp://127.0.0.1:1",))
B = WorkerRecord("b", 1, 6, ("tcp://127.0.0.1:2",))
_NONCES = (b"1" * NONCE_SIZE, b"2" * NONCE_SIZE)
_REFUSALS = (ProtocolError, AuthenticationError, WorkerLost)


def acceptor(token: bytes = TOKEN) -> Acceptor:
    """Return the listening side, as worker a. Its callbacks run only if the opener knows the token."""

    def proved(*_: object) -> tuple[int, int]:
        assert token is not TOKEN, "a peer without the token was accepted"
        return (0, 0)

    return Acceptor(A, token, _NONCES[1], check=proved, resume=proved)


def opener(token: bytes = TOKEN) -> Opener:
    """Return the connecting side, as worker b."""
    return Opener(B, A, token, _NONCES[0], session=9, received=(0, 0), fresh=True)


def _frames(data: bytes) -> Iterable[HandshakeMessage]:
    """Yield the messages in a stream of an unauthenticated peer."""
    reader = FrameReader(HANDSHAKE_LIMITS)
    rest = memoryview(data)
    while rest:
        buffer = reader.buffer()
        assert 0 < len(buffer) <= FrameReader.UNAUTHENTICATED_SCRATCH
        count = min(len(buffer), len(rest))
        buffer[:count] = rest[:count]
        rest = rest[count:]
        for frame in reader.advance(count):
            yield decode_handshake(frame.body)


def _bodies(data: bytes) -> list[bytes]:
    """Return the messages of a structured input: a msgpack array of messages. Otherwise it is one message."""
    try:
        parts = msgspec.msgpack.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return [data]
    return [msgspec.msgpack.encode(part) for part in parts[:8]] if isinstance(parts, list) else [data]


def _run(data: bytes) -> None:
    listening, opening = acceptor(), opener()
    opening.start()
    try:
        for message in _frames(data):
            listening.receive(message)
    except _REFUSALS:
        pass
    for side in (acceptor(), opening):
        for body in _bodies(data):
            try:
                stream = pack_header(Kind.HANDSHAKE, len(body), 0, 0, 0) + body
                for message in _frames(stream):
                    reply = side.receive(message)
                    assert side is not opening, f"the opener believed a peer without the token, and replied {reply}"
            except _REFUSALS:
                break
    assert listening.proof is None


def _transcript(token: bytes) -> list[HandshakeMessage]:
    """Return all messages of a handshake in which both sides have `token`."""
    listening, opening = acceptor(token), opener(token)
    sent: list[HandshakeMessage] = [opening.start()]
    for _ in range(2):
        reply = listening.receive(sent[-1])
        sent.append(reply)
        answer = opening.receive(reply)
        if not isinstance(answer, tuple):
            sent.append(answer)
    return sent


def _seeds() -> Iterable[bytes]:
    sent = _transcript(OTHER_TOKEN)
    yield msgspec.msgpack.encode(sent)
    yield msgspec.msgpack.encode(sent[::2])
    yield msgspec.msgpack.encode(sent[1::2])
    for message in sent:
        body = msgspec.msgpack.encode(message)
        yield body
        yield pack_header(Kind.HANDSHAKE, len(body), 0, 0, 0) + body
    yield msgspec.msgpack.encode([[15, "session", "reason"]])


HANDSHAKE = Target("handshake", _run, (), _seeds, mutate_msgpack)
