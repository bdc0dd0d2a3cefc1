"""Messages of the handshake, the only ones that are decoded before the peer is authenticated.

The `proof` of a message covers all its other fields, and all messages before it: see `telegrad.connection.handshake`.
"""

from __future__ import annotations

from enum import IntEnum

import msgspec

from telegrad.errors import ProtocolError


class Purpose(IntEnum):
    """What a connection is opened for."""

    SESSION = 0
    VOTE = 1
    """To get the listener's vote for the opener, which wants to take the place of a worker. It ends with a Welcome."""
    PROBE = 2
    """To see whether the listener is there, and stays. It ends with a Welcome."""
    DESCRIBE = 3
    """To learn of a member of the listener's group. It ends with a Description. The target may be empty: anybody."""
    OBSERVE = 4
    """To look at the listener's group, without being a member. The target may be empty: anybody."""

    @property
    def is_question(self) -> bool:
        """Whether the opener asks for something, without a session."""
        return self is not Purpose.SESSION


class Hello(msgspec.Struct, frozen=True, array_like=True, tag=11, forbid_unknown_fields=True):
    """The first frame on a connection, from the worker that opened it."""

    name: str
    id: int
    incarnation: int
    generation: int
    """The opener's; see `telegrad.protocol.membership`. With the purpose VOTE, the one that it wants."""
    purpose: Purpose
    addresses: tuple[str, ...]
    host: str
    main: str
    tls: bool
    """Whether the opener encrypts tcp connections."""
    accept: str
    """Which calls the opener's group accepts; see `telegrad.settings.AgentSettings.accept`."""
    devices: tuple[tuple[str, int], ...]
    """The opener's accelerators."""
    target: str
    """The name of the worker that the opener wants to reach."""
    dialled: str
    """The address at which it expects that worker, as the worker itself announced it."""
    nonce: bytes
    attempt: int
    """Grows with every connection that the opener opens. So one that it gave up cannot replace a later one."""
    session: int
    """Chosen by the opener. A reconnect names the session that it resumes. With the purpose DESCRIBE, the id of the
    member that the opener wants to learn of: that one, or the next."""
    received: tuple[int, int]
    """How much of the session the opener has already received."""
    fresh: bool
    """The opener has no state for this session: a listener that has one must not resume it."""
    proof: bytes


class Challenge(msgspec.Struct, frozen=True, array_like=True, tag=12, forbid_unknown_fields=True):
    """The listener's response to a Hello that was proved."""

    name: str
    id: int
    incarnation: int
    accept: str
    known_generation: int
    """The highest generation of the opener's name that the listener knows of; -1 if it does not know the name."""
    nonce: bytes
    proof: bytes


class Proof(msgspec.Struct, frozen=True, array_like=True, tag=13, forbid_unknown_fields=True):
    """The opener proves itself for the listener's nonce, so its Hello was not a recorded one."""

    proof: bytes


class Welcome(msgspec.Struct, frozen=True, array_like=True, tag=14, forbid_unknown_fields=True):
    """The listener accepts the opener, and tells how much of the session it has already received."""

    received: tuple[int, int]
    proof: bytes


class Description(msgspec.Struct, frozen=True, array_like=True, tag=16, forbid_unknown_fields=True):
    """The listener describes one member of its group. A message of the handshake is too small for all of them."""

    record: bytes
    """Its WorkerRecord; empty if there is none with that id or a higher one."""
    state: int
    """What the listener holds it for; see `telegrad.protocol.membership.State`."""
    is_open: bool
    """Whether the group is open."""
    proof: bytes


class Reject(msgspec.Struct, frozen=True, array_like=True, tag=15, forbid_unknown_fields=True):
    """A side to which the other has proved itself ends the handshake, and says who it is and why."""

    name: str
    id: int
    incarnation: int
    code: str
    reason: str
    proof: bytes


HandshakeMessage = Hello | Challenge | Proof | Welcome | Reject | Description

_decoder: msgspec.msgpack.Decoder[HandshakeMessage] = msgspec.msgpack.Decoder(HandshakeMessage)


def decode_handshake(data: bytes | bytearray | memoryview) -> HandshakeMessage:
    """Decode a handshake message. Raise ProtocolError for anything else."""
    try:
        return _decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"invalid handshake message: {error}") from error
