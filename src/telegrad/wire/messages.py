"""The whole vocabulary: one frozen struct per message.

A message's values travel outside its struct, as pickled data and a region of tensor contents (see `frames`);
`attachments` describes that region.
"""

from __future__ import annotations

import msgspec

from telegrad.errors import ProtocolError
from telegrad.wire.tensors import TensorDescriptor


class Request(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Run a function, and answer with a Reply or a Failure."""

    call: int
    function: str
    """``module:qualname``; ``@name`` for a function that was registered under a name; empty if it is in the data."""
    timeout: float
    """Seconds until the caller stops waiting; 0: it waits for as long as it takes."""
    nested: bool
    """Made while the caller itself was serving a call: no credits are taken, or nesting could deadlock."""
    attachments: tuple[TensorDescriptor, ...] = ()


class Reply(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """The function returned; the data is its result."""

    call: int
    attachments: tuple[TensorDescriptor, ...] = ()


class Failure(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """The function raised, or could not be run. The data is the pickled exception, if it could be pickled."""

    call: int
    type_name: str
    text: str
    traceback: str
    not_found: bool = False
    """The callee has no such function."""
    attachments: tuple[TensorDescriptor, ...] = ()


class Cancel(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """The caller no longer wants the answer."""

    call: int
    reason: str


Head = Request | Reply | Failure | Cancel

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Head] = msgspec.msgpack.Decoder(Head)

encode_head = _encoder.encode


def decode_head(data: bytes | bytearray | memoryview) -> Head:
    """Read a head. What is not one of the structs above is a ProtocolError."""
    try:
        return _decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ProtocolError(f"a message head that cannot be read: {error}") from error


# -- before the peer has proved itself ------------------------------------------------------------------------


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
    """The answer of the worker that was connected to, with its proof."""

    name: str
    id: int
    incarnation: int
    nonce: bytes
    proof: bytes


class Proof(msgspec.Struct, frozen=True, array_like=True, tag=13):
    """The opener's proof, and what of this session has reached it before."""

    proof: bytes
    session: int
    """Chosen by the opener; a reconnect names the session that it goes on with."""
    received: tuple[int, int]
    fresh: bool
    """The opener has no such session from before: a listener that has one must not go on with it."""


class Welcome(msgspec.Struct, frozen=True, array_like=True, tag=14):
    """The listener lets the opener in, and says what of this session has reached it before."""

    received: tuple[int, int]


class Reject(msgspec.Struct, frozen=True, array_like=True, tag=15):
    """Either side ends the handshake, and says why."""

    code: str
    reason: str


Greeting = Hello | Challenge | Proof | Welcome | Reject

_greeting_decoder: msgspec.msgpack.Decoder[Greeting] = msgspec.msgpack.Decoder(Greeting)


def decode_greeting(data: bytes | bytearray | memoryview) -> Greeting:
    """Read a handshake message. What is not one is a ProtocolError."""
    try:
        return _greeting_decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ProtocolError(f"a handshake message that cannot be read: {error}") from error
