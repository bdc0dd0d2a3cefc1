"""The handshake, with an attacker between an opener and a listener that does not know the token.

An input is a msgpack array: the kind of connection, then the attacker's steps. In a step it sends one side a message of
its own, or one that a worker of the group has sent, as it is or with a field changed: on an earlier connection, or on
this one. A side that refuses it is replaced by a new one, as if it connected again. Any other input is a stream of
bytes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import msgspec

from fuzz.mutators import mutate_msgpack
from fuzz.target import Target
from telegrad.connection.group_keys import derive_keys
from telegrad.connection.handshake import NONCE_SIZE, Acceptor, AnotherWorker, Opener, Refused, Rejected
from telegrad.connection.worker_record import WorkerRecord
from telegrad.errors import AuthenticationError, ProtocolError, WorkerLost
from telegrad.wire.frame_reader import FrameReader
from telegrad.wire.frames import HANDSHAKE_LIMITS, Kind, pack_header
from telegrad.wire.handshake_messages import Challenge, Description, HandshakeMessage, Hello, decode_handshake

KEY = derive_keys(b"the token of the group, 32 bytes").handshake
OTHER_KEY = derive_keys(b"another group's token, 32 bytes.").handshake
A = WorkerRecord("a", 0, 5, ("tcp://127.0.0.1:1",))
B = WorkerRecord("b", 1, 6, ("tcp://127.0.0.1:2",))
MOST_STEPS = 24
_REFUSALS = (ProtocolError, AuthenticationError, WorkerLost)
_PLAIN, _NO_KEY, _NAMES = 1, 2, 4  # bits of the kind of connection


@dataclass
class Channel:
    """What the handshake sees of a link."""

    binding: bytes = b""
    peer_names: tuple[str, ...] | None = None


LISTENERS = Channel(b"the certificate of the listener.")
ATTACKERS = Channel(b"the certificate of the attacker.")


def _nonce(number: int) -> bytes:
    return number.to_bytes(NONCE_SIZE, "little")


def acceptor(
    key: bytes | None = KEY, link: Channel = LISTENERS, number: int = 1, me: WorkerRecord = A
) -> tuple[Acceptor, list[Hello]]:
    """Return a listening side, and the list in which it puts what it accepts."""
    accepted: list[Hello] = []

    def resume(hello: Hello) -> tuple[int, int]:
        accepted.append(hello)
        return (0, 0)

    acceptor = Acceptor(
        me,
        key,
        _nonce(number),
        check=accepted.append,
        resume=resume,
        known_generation=lambda hello: hello.generation - 1,
        describe=lambda hello: Description(b"", 0, False, b""),
        link=link,
    )
    return acceptor, accepted


def opener(
    key: bytes | None = KEY, link: Channel = LISTENERS, number: int = 2, me: WorkerRecord = B, target: WorkerRecord = A
) -> Opener:
    """Return a connecting side."""
    return Opener(
        *(me, target, key, _nonce(number)),
        dialled=target.addresses[0],
        session=9,
        received=(0, 0),
        fresh=True,
        attempt=1,
        link=link,
    )


def _transcript(key: bytes | None, link: Channel, me: WorkerRecord, target: WorkerRecord) -> list[HandshakeMessage]:
    """Return all messages of a handshake between two workers with the same key."""
    (listening, _), opening = acceptor(key, link, 3, target), opener(key, link, 4, me, target)
    sent: list[HandshakeMessage] = [opening.start()]
    for _ in range(2):
        reply = listening.receive(sent[-1])
        sent.append(reply)
        answer = opening.receive(reply)
        if not isinstance(answer, tuple):
            sent.append(answer)
    return [*sent, listening.reject("session", "it is over"), opening.reject("certificate", "it is not for a")]


def record() -> tuple[HandshakeMessage, ...]:
    """Return messages of earlier connections.

    Of this group with the listener's certificate and without TLS, in the other direction, of another group, and of a
    group without a token.
    """
    return (
        *_transcript(KEY, LISTENERS, B, A),
        *_transcript(KEY, Channel(), B, A),
        *_transcript(KEY, LISTENERS, A, B),
        *_transcript(OTHER_KEY, LISTENERS, B, A),
        *_transcript(None, LISTENERS, B, A),
    )


RECORDED = record()


def _frames(data: bytes) -> Iterable[HandshakeMessage]:
    """Yield the messages in a stream of an unauthenticated peer."""
    reader = FrameReader(HANDSHAKE_LIMITS)
    rest = memoryview(data)
    while rest:
        buffer = reader.buffer()
        assert 0 < len(buffer) <= FrameReader.SCRATCH
        count = min(len(buffer), len(rest))
        buffer[:count] = rest[:count]
        rest = rest[count:]
        for frame in reader.advance(count):
            yield decode_handshake(frame.body)


def framed(body: bytes) -> bytes:
    """Return a handshake message as a frame."""
    return pack_header(Kind.HANDSHAKE, len(body), 0, 0, 0) + body


class _Attack:
    """An attacker between workers that connect again and again."""

    def __init__(self, connection: int) -> None:
        self._key = None if connection & _NO_KEY else KEY
        names = ("b",) if connection & _NAMES else None
        plain = connection & _PLAIN
        self._to_listener = Channel(b"" if plain else LISTENERS.binding, names)
        self._to_opener = Channel(b"" if plain else ATTACKERS.binding, ("a",) if names else None)
        self._plain = bool(plain)
        self._known = list(RECORDED)
        self._live: list[HandshakeMessage] = []  # what the two sides have sent
        self._connections = 10
        self._listen()
        self._open()

    def _listen(self) -> None:
        self._connections += 1
        self._acceptor, self._accepted = acceptor(self._key, self._to_listener, self._connections)

    def _open(self) -> None:
        self._connections += 1
        self._opener = opener(self._key, self._to_opener, self._connections)
        self._say(self._opener.start())

    def _say(self, message: HandshakeMessage) -> None:
        self._live.append(message)
        self._known.append(message)

    def step(self, to_listener: bool, body: bytes) -> None:
        """Send one side a message, and check what it believes."""
        try:
            for message in _frames(framed(body)):
                if to_listener:
                    self._say(self._acceptor.receive(message))
                    self._check_accepted()
                    continue
                try:
                    reply = self._opener.receive(message)
                except (WorkerLost, Refused, AnotherWorker, Rejected) as error:  # only a proved message may cause them
                    self._check_believed(message, f"raised {error!r}")
                    raise
                self._check_believed(message, f"replied {reply}")
                if not isinstance(reply, tuple):
                    self._say(reply)
        except _REFUSALS as error:
            greeting = getattr(error, "greeting", None)
            if greeting is not None:
                self._say(greeting)
            self._check_accepted()
            if to_listener:
                self._listen()
            else:
                self._open()

    def _check_accepted(self) -> None:
        if self._key is None:
            return  # the kernel identifies the peers of unix sockets
        for hello in self._accepted:
            assert self._plain, "a relayed connection was accepted over TLS"
            assert hello in self._live, "an opener was accepted that does not connect now, or whose Hello was altered"

    def _check_believed(self, message: HandshakeMessage, effect: str) -> None:
        if self._key is None:
            return
        assert self._plain, f"the opener believed an attacker with another certificate, and {effect}"
        assert message in self._live, f"the opener believed a message of another connection, and {effect}"

    def message(self, step: Any) -> bytes:
        """Return the message that a step sends."""
        if not isinstance(step, list) or not step or type(step[0]) is not int:
            return msgspec.msgpack.encode(step)
        known = msgspec.to_builtins(self._known[step[0] % len(self._known)], builtin_types=(bytes,))
        if len(step) > 2 and type(step[1]) is int:
            known[step[1] % len(known)] = step[2]
        return msgspec.msgpack.encode(known)


def _run(data: bytes) -> None:
    try:
        program = msgspec.msgpack.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        program = None
    if not isinstance(program, list) or not program or type(program[0]) is not int:
        _run_stream(data)
        return
    attack = _Attack(program[0])
    for step in program[1 : MOST_STEPS + 1]:
        if isinstance(step, list) and len(step) == 2:
            attack.step(bool(step[0]), attack.message(step[1]))


def _run_stream(data: bytes) -> None:
    for stream in (data, framed(data)):
        listening, accepted = acceptor()
        try:
            for message in _frames(stream):
                listening.receive(message)
        except _REFUSALS:
            pass
        assert not accepted
        assert listening.proof is None


_ALTERED_HELLOS = {
    "accept": "registered",
    "generation": 2**63,
    "purpose": 1,
    "devices": [["cuda", 2]],
    "addresses": ["tcp://[::1]:1"],
    "dialled": "tcp://127.0.0.1:2",
    "attempt": 2**64 - 1,
}


def _index(kind: type[Hello | Challenge], field: str) -> int:
    """Return where a field is in the array of a message, whose tag comes first."""
    return 1 + kind.__struct_fields__.index(field)


def _seeds() -> Iterable[bytes]:
    encode = msgspec.msgpack.encode
    count = len(RECORDED)
    relayed = [[True, [count]], [False, [count + 1]], [True, [count + 2]], [False, [count + 3]]]
    for connection in (0, _PLAIN, _NO_KEY, _PLAIN | _NAMES, _NO_KEY | _NAMES):
        yield encode([connection, *relayed])
        yield encode([connection, [True, [0]], [False, [1]], [True, [2]], [False, [3]]])
    for first in range(0, count, 6):
        yield encode([_PLAIN, *([index % 2 == 0, [first + index]] for index in range(6))])
        yield encode([0, *([index % 2 == 0, RECORDED[first + index]] for index in range(4))])
    for field, value in _ALTERED_HELLOS.items():
        yield encode([_PLAIN, [True, [count, _index(Hello, field), value]], [False, [count, 1, "c"]]])
    for field, value in {"known_generation": 2**64 - 1, "nonce": b"", "accept": "registered"}.items():
        altered = [count + 1, _index(Challenge, field), value]
        yield encode([_PLAIN, [True, [count]], [False, altered], [True, [count + 2, 1, b""]]])
    yield encode([_PLAIN, *relayed[:3], [False, [count + 3, 1, [5, 5]]]])
    for message in RECORDED[:6]:
        yield encode(message)
        yield framed(encode(message))


HANDSHAKE = Target("handshake", _run, (), _seeds, mutate_msgpack)
