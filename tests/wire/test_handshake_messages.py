"""Handshake messages round-trip, and nothing else is accepted as one."""

from __future__ import annotations

import contextlib

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from telegrad.errors import ProtocolError
from telegrad.wire.handshake_messages import (
    Challenge,
    HandshakeMessage,
    Hello,
    Proof,
    Purpose,
    Reject,
    Welcome,
    decode_handshake,
)
from telegrad.wire.messages import Cancel, Reply, decode_head, encode_head

numbers = st.integers(0, 2**64 - 1)
texts = st.text(max_size=50)
nonces = st.binary(max_size=64)
pairs = st.tuples(numbers, numbers)
addresses = st.lists(texts, max_size=3).map(tuple)
devices = st.lists(st.tuples(texts, numbers), max_size=2).map(tuple)
handshake_messages = st.one_of(
    st.builds(
        Hello,
        *(texts, numbers, numbers, numbers, st.sampled_from(Purpose), addresses, texts, texts, st.booleans(), texts),
        *(devices, texts, texts, nonces),
        *(numbers, numbers, pairs, st.booleans(), nonces),
    ),
    st.builds(Challenge, texts, numbers, numbers, texts, st.integers(-1, 2**63), nonces, nonces),
    st.builds(Proof, nonces),
    st.builds(Welcome, pairs, nonces),
    st.builds(Reject, texts, numbers, numbers, texts, texts, nonces),
)


@given(message=handshake_messages)
def test_every_handshake_message_round_trips(message: HandshakeMessage) -> None:
    assert decode_handshake(msgspec.msgpack.encode(message)) == message


@given(message=handshake_messages)
def test_a_message_with_more_or_fewer_fields_is_not_accepted(message: HandshakeMessage) -> None:
    fields = msgspec.msgpack.decode(msgspec.msgpack.encode(message))
    for other in ([*fields, None], fields[:-1]):
        with pytest.raises(ProtocolError):
            decode_handshake(msgspec.msgpack.encode(other))


@given(noise=st.binary(max_size=100))
def test_random_bytes_raise_only_protocol_errors(noise: bytes) -> None:
    with contextlib.suppress(ProtocolError):
        decode_handshake(noise)


@given(message=handshake_messages)
def test_a_handshake_message_is_not_a_head(message: HandshakeMessage) -> None:
    with pytest.raises(ProtocolError):
        decode_head(msgspec.msgpack.encode(message))


@pytest.mark.parametrize("head", [Cancel(1, "reason"), Reply(1)])
def test_a_head_is_not_a_handshake_message(head: Cancel | Reply) -> None:
    with pytest.raises(ProtocolError):
        decode_handshake(encode_head(head))


def test_deep_nesting_raises_a_protocol_error() -> None:
    for start in (b"", b"\x97\x0f\xa1x\x01\x01\xa1x\xa1x"):
        with pytest.raises(ProtocolError):
            decode_handshake(start + b"\x91" * 5000 + b"\x00")


def test_false_lengths_allocate_nothing() -> None:
    # An array, and bytes, of 2**32 - 1 elements each, without the elements.
    for lie in (b"\xdd\xff\xff\xff\xff", b"\x92\x0d\xc6\xff\xff\xff\xff"):
        with pytest.raises(ProtocolError):
            decode_handshake(lie)


def test_every_purpose_but_a_session_is_a_question() -> None:
    assert [purpose for purpose in Purpose if not purpose.is_question] == [Purpose.SESSION]
