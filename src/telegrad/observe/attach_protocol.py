"""What an observer that is not a member and a worker say to each other: requests and answers, one at a time.

On this host they travel over a unix socket, each after its length in four bytes. From another host they travel over the
connections of the group, after a handshake with the purpose OBSERVE (see `telegrad.observe.remote`). All of it is plain
data, of bounded size.
"""

from __future__ import annotations

import socket
import struct

import msgspec

from telegrad.errors import LimitExceeded
from telegrad.observe.model import EventPosition, GroupView, Time, ViewRequest

MOST_REQUEST = 1 << 20
"""Bytes of a request."""
MOST_ANSWER = 256 << 20
"""Bytes of an answer."""
MOST_OBSERVERS = 8
"""Connections of observers at one worker, of each of the two ways."""
MOST_TIMEOUT = 60.0
"""Seconds for which an observer may have a worker wait for the others."""
_LENGTH = struct.Struct("<I")


class AttachRequest(msgspec.Struct, frozen=True):
    """What an observer wants to know."""

    view: ViewRequest = ViewRequest()
    since: dict[str, EventPosition] = {}
    """The first events wanted, by worker."""
    timeout: float = 3.0
    clocks: bool = False
    only: tuple[str, ...] | None = None
    """The workers to ask; None: all."""
    who: bool = False
    """Nothing but who the worker is, and its group."""


class Identity(msgspec.Struct, frozen=True):
    """Who a worker is, and which group it belongs to."""

    name: str
    id: int
    incarnation: int
    pid: int
    now: Time
    addresses: tuple[str, ...] = ()
    group: dict[str, int] = {}
    """The incarnations of all members, by name."""


class AttachAnswer(msgspec.Struct, frozen=True):
    """The answer of a worker: an error, or one of the rest."""

    error: str = ""
    identity: Identity | None = None
    group: GroupView | None = None


def too_many(worker: str) -> bytes:
    """Return the answer to an observer for whom there is no room."""
    text = f"worker {worker!r} has {MOST_OBSERVERS} observers, which is the most: end one of them (`telegrad top`, ...)"
    return encode(AttachAnswer(text))


decode_attach_request = msgspec.msgpack.Decoder(AttachRequest).decode
decode_attach_answer = msgspec.msgpack.Decoder(AttachAnswer).decode
encode = msgspec.msgpack.encode


def send(sock: socket.socket, data: bytes) -> None:
    """Send a message."""
    sock.sendall(_LENGTH.pack(len(data)) + data)


def receive(sock: socket.socket, most: int) -> bytes | None:
    """Return the next message; None if the other side has ended the connection. Raises if it is larger than `most`."""
    header = _read(sock, _LENGTH.size)
    if header is None:
        return None
    (size,) = _LENGTH.unpack(header)
    if size > most:
        raise LimitExceeded(f"a message of {size:,} bytes; the limit is {most:,}")
    return _read(sock, size)


def _read(sock: socket.socket, size: int) -> bytes | None:
    data = bytearray()
    while len(data) < size:
        part = sock.recv(min(size - len(data), 1 << 20))
        if not part:
            return None
        data += part
    return bytes(data)
