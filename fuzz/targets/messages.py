"""Heads of messages between authenticated workers."""

from __future__ import annotations

import random
from collections.abc import Iterable

from fuzz.choices import Choices
from fuzz.hostile_messages import HostileMember
from fuzz.mutators import mutate_msgpack
from fuzz.target import Target
from telegrad.errors import ProtocolError
from telegrad.wire.messages import decode_head, encode_head, peek_call


def _run(data: bytes) -> None:
    peeked = peek_call(data)
    assert peeked is None or all(0 <= number < 2**64 for number in peeked)
    head = decode_head(data)
    encoded = encode_head(head)
    assert encode_head(decode_head(encoded)) == encoded
    call = getattr(head, "call", None)
    if isinstance(call, int) and call >= 0 and type(head).__struct_fields__[0] == "call":
        # What can be read of a truncated head is what the whole head says.
        assert peek_call(encoded[:32]) == (type(head).__struct_config__.tag, call)


def _seeds() -> Iterable[bytes]:
    rng = random.Random(0)
    member = HostileMember((1, 5), (0, 6), ((2, 7),))
    for index in range(64):
        yield encode_head(member.message(Choices(rng.randbytes(100)), is_reply=index % 4 == 0)[0])


MESSAGES = Target("messages", _run, (ProtocolError,), _seeds, mutate_msgpack)
