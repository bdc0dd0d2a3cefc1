"""What members say about the group: the Hello of one that has proved itself, requests for votes, and descriptions.

An input is a msgpack array: whether the group is open, then events. An event is a Hello, of which some fields are
changed; what a member has told this newcomer about the group; or the loss of a worker. Whatever is said, names and ids
stay unique, this worker stays itself, and each name can be given to another worker: generations are not used up.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from fuzz.mutators import mutate_msgpack
from fuzz.target import Target
from fuzz.threadless_agent import B, C, ThreadlessAgent
from telegrad.connection.handshake import NONCE_SIZE, Rejected
from telegrad.connection.joining import parse_description
from telegrad.connection.members import identity_of
from telegrad.connection.peers import Peers
from telegrad.connection.worker_record import MAX_GENERATION, check_record
from telegrad.errors import ProtocolError
from telegrad.protocol.membership import MAX_STEP
from telegrad.transport.base import LinkClosed
from telegrad.wire.handshake_messages import Hello, Purpose, decode_handshake

MOST_EVENTS = 32
_HELLO = Hello(
    *(B.name, B.id, B.incarnation, B.generation, Purpose.SESSION, B.addresses, B.host, B.main, B.tls, B.accept),
    *((("cuda", 2),), "a", "memory://a", bytes(NONCE_SIZE), 1, 9, (0, 0), True, b""),
)
_FIELDS = 1 + len(Hello.__struct_fields__)  # the tag comes first


class _Link:
    resumable = True


def _run(data: bytes) -> None:
    try:
        program = msgspec.msgpack.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return
    if not isinstance(program, list) or not program:
        return
    harness = ThreadlessAgent()
    peers = harness.agent.peers
    peers.set_group([harness.agent.me, B, C], is_open=program[0] is True)
    for event in program[1 : MOST_EVENTS + 1]:
        if isinstance(event, dict):
            _greet(peers, event)
        elif isinstance(event, list):
            _describe(harness, event)
        elif event in ("b", "c"):
            harness.lose(event)
        harness.settle()
        _check(harness)


def _greet(peers: Peers, changes: dict[Any, Any]) -> None:
    """Take the Hello of a member, after its Proof."""
    fields = msgspec.to_builtins(_HELLO, builtin_types=(bytes,))
    for index, value in changes.items():
        if type(index) is int:
            fields[1 + index % (_FIELDS - 1)] = value
    try:
        hello = decode_handshake(msgspec.msgpack.encode(fields))
        assert isinstance(hello, Hello)
        known = peers.known_generation(hello)
        assert known <= MAX_GENERATION
        peers.check(hello)
        if hello.purpose is Purpose.SESSION:
            peers.resume(_any(_Link()), hello)
            assert peers.find(hello.name).record.incarnation == hello.incarnation
    except (Rejected, ProtocolError, LinkClosed):
        return


def _describe(harness: ThreadlessAgent, description: list[Any]) -> None:
    """Take what a member has told a newcomer."""
    try:
        told = parse_description(description)
    except ProtocolError:
        return
    harness.agent.joining._take(B, told, {})


def _check(harness: ThreadlessAgent) -> None:
    agent, peers = harness.agent, harness.agent.peers
    assert peers.find("a").record == agent.me
    assert peers.find(0).record == agent.me
    records = peers.records()
    assert len({record.name for record in records}) == len(records) == len(peers.table)
    for record in records:
        check_record(record)
        assert peers.find(record.name) is peers.find(record.id)
    for member in peers.members.all():
        assert member.identity == identity_of(peers.find(member.identity.name).record)
        newcomer = member.identity._replace(incarnation=77)
        known = peers.members.known_generation(newcomer)
        assert known <= (1 + 2 * MOST_EVENTS) * MAX_STEP, "a generation was used up"
    for _, vote in peers.members.votes().items():
        assert vote.at <= agent.runtime.now(), "a vote of the future"
    description = msgspec.msgpack.decode(msgspec.msgpack.encode(agent.joining.describe()))
    assert [record for record, _ in parse_description(description).members] == records


def _any(value: object) -> Any:
    return value


def _seeds() -> Iterable[bytes]:
    encode = msgspec.msgpack.encode
    known = [msgspec.to_builtins(record) for record in (B, C)]
    later = {**known[0], "generation": 1, "incarnation": 70}
    other = {**known[0], "name": "d", "id": 3}
    told = [[[later, 2], [other, 1]], [["c", 3, 9, 0.0]]]
    for is_open in (False, True):
        yield encode([is_open, {}, {2: 70, 3: 1}, {2: 70, 3: 1, 14: 2}])
        yield encode([is_open, {0: "c", 1: 2, 2: 7, 14: 5, 15: 8}, {0: "d", 1: 3}])
        yield encode([is_open, "b", {2: 70, 3: 1, 4: 1}, {2: 71, 3: 1, 4: 1}, {2: 71, 3: 2, 4: 1}, {2: 71, 3: 2}])
        yield encode([is_open, {4: 2}, {4: 1}, {0: "a", 1: 0, 2: 9, 3: 4}])
        yield encode([is_open, [[[one, 0] for one in known], [["b", 0, 6, 1.5]]], told, "c", {0: "c", 1: 2}])
        yield encode([is_open, {10: [["cuda", -1], ["x", 2**40]]}, {5: ["unix:///etc/x", "tcp://h:1"]}, {3: 2**63}])


JOINING = Target("joining", _run, (), _seeds, mutate_msgpack)
