"""Messages of the handshake, the only ones that are decoded before the peer is authenticated."""

from __future__ import annotations

import msgspec

from telegrad.errors import ProtocolError


class Hello(msgspec.Struct, frozen=True, array_like=True, tag=11):
    """The first frame on a connection, from the worker that opened it."""

    name: str
    id: int
    incarnation: int
    addresses: tuple[str, ...]
    main: str
    target: str
    nonce: bytes
    has_token: bool


class Challenge(msgspec.Struct, frozen=True, array_like=True, tag=12):
    """The listener's response, with its proof."""

    name: str
    id: int
    incarnation: int
    nonce: bytes
    proof: bytes


class Proof(msgspec.Struct, frozen=True, array_like=True, tag=13):
    """The opener's proof, and how much of the session it has already received."""

    proof: bytes
    session: int
    """Chosen by the opener. A reconnect names the session that it resumes."""
    received: tuple[int, int]
    fresh: bool
    """The opener has no state for this session: a listener that has one must not resume it."""


class Welcome(msgspec.Struct, frozen=True, array_like=True, tag=14):
    """The listener accepts the opener, and tells how much of the session it has already received."""

    received: tuple[int, int]


class Reject(msgspec.Struct, frozen=True, array_like=True, tag=15):
    """Either side aborts the handshake, with a reason."""

    code: str
    reason: str


HandshakeMessage = Hello | Challenge | Proof | Welcome | Reject

_decoder: msgspec.msgpack.Decoder[HandshakeMessage] = msgspec.msgpack.Decoder(HandshakeMessage)


def decode_handshake(data: bytes | bytearray | memoryview) -> HandshakeMessage:
    """Decode a handshake message. Raise ProtocolError for anything else."""
    try:
        return _decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"invalid handshake message: {error}") from error
