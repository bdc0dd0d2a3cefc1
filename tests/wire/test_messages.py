"""Every message round-trips, and nothing else is accepted as one."""

from __future__ import annotations

import contextlib
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from telegrad.errors import ProtocolError
from telegrad.wire.messages import (
    AbortPass,
    AdoptAutogradContext,
    Autocast,
    AutogradMetadata,
    Cancel,
    CleanupAutogradContextReq,
    Creation,
    Failure,
    FailureWithProfiling,
    ForkInfo,
    Head,
    LeadsToInputReq,
    PassFailure,
    PassInfo,
    PiggybackedResp,
    ProbeReq,
    PropagateGradientsReq,
    PropagateGradientsResp,
    Reply,
    Request,
    RequestWithState,
    ResumeReq,
    RpcWithProfilingReq,
    RpcWithProfilingResp,
    RRefAccess,
    RRefBackwardReq,
    RRefBackwardResp,
    RRefChildAccept,
    RRefForkAccept,
    RRefForkRequest,
    RRefSkip,
    RRefUserDelete,
    StepInPass,
    StreamPosition,
    WorkerReport,
    decode_head,
    encode_head,
    peek_call,
)
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

rrefs, forks = st.tuples(numbers, numbers, numbers), st.tuples(numbers, numbers)
autocasts = st.builds(Autocast, st.lists(st.tuples(texts, numbers), max_size=2).map(tuple), st.booleans())
metadata = st.none() | st.builds(AutogradMetadata, numbers, numbers, shapes, numbers)
fork_infos = st.lists(st.builds(ForkInfo, numbers, rrefs, forks, numbers, st.booleans()), max_size=2).map(tuple)
creations = st.none() | st.builds(Creation, rrefs, forks, st.booleans(), signed)
positions = st.builds(StreamPosition, rrefs, numbers, numbers)
accesses = st.none() | st.builds(RRefAccess, rrefs, texts, st.none() | positions)
call = (numbers, texts, seconds, st.booleans(), descriptors, metadata, fork_infos, creations, accesses)
steps = st.lists(st.builds(StepInPass, numbers, st.binary(max_size=9)), max_size=2).map(tuple)
passes = st.builds(PassInfo, numbers, numbers, *[st.booleans()] * 2, numbers, steps, numbers, st.none() | autocasts)
reports = st.lists(st.builds(WorkerReport, numbers, numbers, st.booleans()), max_size=2).map(tuple)
failures = st.builds(PassFailure, numbers, texts, texts)
responses = st.none() | st.builds(PiggybackedResp, numbers, numbers, reports)

heads = st.one_of(
    st.builds(Request, *call),
    st.builds(RequestWithState, *call, autocasts),
    st.builds(RpcWithProfilingReq, *call, autocasts, st.just(()), numbers),
    st.builds(Reply, numbers, descriptors, metadata, fork_infos),
    st.builds(Failure, numbers, texts, texts, texts, st.booleans(), descriptors),
    st.builds(RpcWithProfilingResp, numbers, descriptors, metadata, fork_infos, st.binary(max_size=9)),
    st.builds(FailureWithProfiling, numbers, texts, texts, texts, st.booleans(), descriptors, st.binary(max_size=9)),
    st.builds(Cancel, numbers, texts),
    st.builds(
        PropagateGradientsReq,
        *(numbers, passes, numbers, shapes, st.booleans(), descriptors, metadata, st.booleans(), responses),
    ),
    st.builds(PropagateGradientsResp, numbers, numbers, numbers, numbers, reports, texts, st.none() | failures),
    st.builds(ProbeReq, numbers, passes, numbers, shapes),
    st.builds(LeadsToInputReq, numbers, passes, numbers, shapes),
    st.builds(ResumeReq, numbers, passes),
    st.builds(AbortPass, passes, failures),
    st.builds(CleanupAutogradContextReq, numbers, numbers),
    st.builds(AdoptAutogradContext, numbers),
    st.builds(RRefForkRequest, rrefs, forks),
    st.builds(RRefForkAccept, forks, st.booleans()),
    st.builds(RRefChildAccept, forks),
    st.builds(RRefUserDelete, rrefs, forks),
    st.builds(RRefSkip, positions, st.booleans()),
    st.builds(RRefBackwardReq, numbers, rrefs, numbers, st.booleans()),
    st.builds(RRefBackwardResp, numbers),
)


@given(head=heads)
def test_every_head_round_trips(head: Head) -> None:
    encoded = encode_head(head)
    assert decode_head(encoded) == head
    assert decode_head(memoryview(encoded)) == head
    assert decode_head(bytearray(encoded)) == head


@given(noise=st.binary(max_size=100))
def test_random_bytes_raise_only_protocol_errors(noise: bytes) -> None:
    with contextlib.suppress(ProtocolError):
        decode_head(noise)


@given(head=heads, data=st.data())
def test_a_truncated_or_corrupted_head_raises_a_protocol_error_or_is_another_head(
    head: Head, data: st.DataObject
) -> None:
    encoded = encode_head(head)
    cut = data.draw(st.integers(0, len(encoded) - 1))
    with pytest.raises(ProtocolError, match="invalid message head"):
        decode_head(encoded[:cut])
    corrupted = bytearray(encoded)
    corrupted[cut] = data.draw(st.integers(0, 255))
    try:
        decode_head(corrupted)
    except ProtocolError:
        return


def test_deep_nesting_raises_a_protocol_error() -> None:
    for start in (b"", b"\x94\x04\x01\xa1x"):
        with pytest.raises(ProtocolError):
            decode_head(start + b"\x91" * 5000 + b"\x00")


def test_text_that_is_not_utf8_raises_a_protocol_error() -> None:
    encoded = encode_head(Cancel(1, "abc")).replace(b"abc", b"a\xff\xfe")
    with pytest.raises(ProtocolError, match="invalid message head"):
        decode_head(encoded)


def test_false_lengths_allocate_nothing() -> None:
    # An array, and a text, of 2**32 - 1 elements each, without the elements.
    for lie in (b"\xdd\xff\xff\xff\xff", b"\x93\x04\x01\xdb\xff\xff\xff\xff"):
        with pytest.raises(ProtocolError):
            decode_head(lie)


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
def test_wrong_types_and_missing_fields_raise_a_protocol_error(wrong: object) -> None:
    with pytest.raises(ProtocolError):
        decode_head(msgspec.msgpack.encode(wrong))


def test_tags_are_unique_and_never_change() -> None:
    """Workers of different versions agree on these numbers."""
    tags = {cls.__name__: msgspec.inspect.type_info(cls).tag for cls in get_args(Head)}  # type: ignore[union-attr]
    assert tags == {
        "Request": 1,
        "Reply": 2,
        "Failure": 3,
        "Cancel": 4,
        "PropagateGradientsReq": 5,
        "PropagateGradientsResp": 6,
        "ProbeReq": 7,
        "ResumeReq": 8,
        "AbortPass": 9,
        "CleanupAutogradContextReq": 10,
        "RRefBackwardReq": 16,
        "RRefBackwardResp": 17,
        "RRefForkRequest": 18,
        "RRefForkAccept": 19,
        "RRefChildAccept": 20,
        "RRefUserDelete": 21,
        "RRefSkip": 22,
        "AdoptAutogradContext": 23,
        "LeadsToInputReq": 24,
        "RequestWithState": 30,
        "DialBack": 31,
        "RpcWithProfilingReq": 32,
        "RpcWithProfilingResp": 33,
        "FailureWithProfiling": 34,
        "TracedRequest": 35,
        "ObserveReq": 36,
        "ObserveResp": 37,
    }


@given(
    head=st.one_of(st.builds(Request, *call), st.builds(Reply, numbers), st.builds(Cancel, numbers, texts)),
    size=st.integers(0, 200),
)
def test_the_call_of_a_truncated_head_is_found_or_unknown_but_never_wrong(head: Any, size: int) -> None:
    encoded = encode_head(head)
    expected = {Request: 1, Reply: 2, Cancel: 4}[type(head)], head.call
    found = peek_call(encoded[:size])
    assert found == expected if size >= min(len(encoded), 11) else found in (expected, None)


@pytest.mark.parametrize(
    ("head", "expected"),
    [
        (b"", None),
        (b"\x93", None),
        (b"\x93\x01", None),
        (b"\x93\x01\xcd\x01", None),
        (b"\x93\x01\xa1x", None),
        (b"\x93\x01\x7f", (1, 127)),
        (b"\xdc\x00\x03\x01\xcd\x01\x02", (1, 258)),
        (b"\xdd\x00\x00\x00\x03\x02\xcc\xff", (2, 255)),
    ],
)
def test_peeking_at_a_call_understands_every_encoding_of_integers(head: bytes, expected: object) -> None:
    assert peek_call(head) == expected
    assert peek_call(memoryview(head)) == expected
