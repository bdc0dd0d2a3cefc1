"""The vocabulary: every struct comes back as it went, and nothing else is taken for one."""

from __future__ import annotations

from collections.abc import Callable

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
    Reject,
    Welcome,
    decode_handshake,
)
from telegrad.wire.messages import Cancel, Failure, Head, Reply, Request, decode_head, encode_head
from telegrad.wire.tensors import TensorDescriptor

numbers = st.integers(0, 2**64 - 1)
signed = st.integers(-(2**63), 2**63 - 1)
shapes = st.lists(signed, max_size=4).map(tuple)
descriptors = st.lists(
    st.builds(TensorDescriptor, numbers, numbers, numbers, shapes, shapes, st.booleans(), st.text(max_size=9)),
    max_size=3,
).map(tuple)
texts = st.text(max_size=50)
seconds = st.floats(0, 1e9)

heads = st.one_of(
    st.builds(Request, numbers, texts, seconds, st.booleans(), descriptors),
    st.builds(Reply, numbers, descriptors),
    st.builds(Failure, numbers, texts, texts, texts, st.booleans(), descriptors),
    st.builds(Cancel, numbers, texts),
)
nonces = st.binary(max_size=64)
pairs = st.tuples(numbers, numbers)
greetings = st.one_of(
    st.builds(
        Hello, texts, numbers, numbers, st.lists(texts, max_size=3).map(tuple), texts, texts, nonces, st.booleans()
    ),
    st.builds(Challenge, texts, numbers, numbers, nonces, nonces),
    st.builds(Proof, nonces, numbers, pairs, st.booleans()),
    st.builds(Welcome, pairs),
    st.builds(Reject, texts, texts),
)


@given(head=heads)
def test_every_head_comes_back_as_it_went(head: Head) -> None:
    encoded = encode_head(head)
    assert decode_head(encoded) == head
    assert decode_head(memoryview(encoded)) == head
    assert decode_head(bytearray(encoded)) == head


@given(greeting=greetings)
def test_every_greeting_comes_back_as_it_went(greeting: HandshakeMessage) -> None:
    assert decode_handshake(msgspec.msgpack.encode(greeting)) == greeting


@given(noise=st.binary(max_size=100))
def test_noise_is_a_protocol_error(noise: bytes) -> None:
    for decode in (decode_head, decode_handshake):
        try:
            decode(noise)
        except ProtocolError:
            continue  # anything else that it raises fails the test


@given(head=heads, data=st.data())
def test_a_head_that_was_cut_or_spoilt_is_a_protocol_error_or_another_head(head: Head, data: st.DataObject) -> None:
    encoded = encode_head(head)
    cut = data.draw(st.integers(0, len(encoded) - 1))
    with pytest.raises(ProtocolError, match="invalid message head"):
        decode_head(encoded[:cut])
    spoilt = bytearray(encoded)
    spoilt[cut] = data.draw(st.integers(0, 255))
    try:
        decode_head(spoilt)
    except ProtocolError:
        return


@given(greeting=greetings)
def test_a_greeting_is_no_head(greeting: HandshakeMessage) -> None:
    with pytest.raises(ProtocolError):
        decode_head(msgspec.msgpack.encode(greeting))


@given(head=heads)
def test_a_head_is_no_greeting(head: Head) -> None:
    with pytest.raises(ProtocolError):
        decode_handshake(encode_head(head))


@pytest.mark.parametrize("decode", [decode_head, decode_handshake])
def test_nesting_without_end_is_a_protocol_error(decode: Callable[[bytes], object]) -> None:
    for start in (b"", b"\x94\x04\x01\xa1x", b"\x94\x0f\xa1x\xa1x"):
        with pytest.raises(ProtocolError):
            decode(start + b"\x91" * 5000 + b"\x00")


def test_text_that_is_no_utf8_is_a_protocol_error() -> None:
    encoded = encode_head(Cancel(1, "abc")).replace(b"abc", b"a\xff\xfe")
    with pytest.raises(ProtocolError, match="invalid message head"):
        decode_head(encoded)


def test_lengths_that_lie_take_no_memory() -> None:
    # An array, a text and bytes of 2**32 - 1 elements each, of which nothing follows.
    for lie in (b"\xdd\xff\xff\xff\xff", b"\x93\x04\x01\xdb\xff\xff\xff\xff", b"\x95\x0d\xc6\xff\xff\xff\xff"):
        for decode in (decode_head, decode_handshake):
            with pytest.raises(ProtocolError):
                decode(lie)


@pytest.mark.parametrize(
    "wrong",
    [
        (4, "1", "reason"),
        (4, 1),
        (4,),
        (),
        (99, 1, "reason"),
        {"call": 1},
        None,
        (1, 1, "f", "soon", False),
        (2, 1, [["not a descriptor"]]),
    ],
)
def test_wrong_types_and_missing_fields_are_a_protocol_error(wrong: object) -> None:
    with pytest.raises(ProtocolError):
        decode_head(msgspec.msgpack.encode(wrong))
