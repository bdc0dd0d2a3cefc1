"""Messages of profiled calls are those of plain calls, with the profiling data added."""

from __future__ import annotations

import pytest

from telegrad.wire.messages import (
    Autocast,
    Failure,
    FailureWithProfiling,
    Reply,
    Request,
    RequestWithState,
    RpcWithProfilingReq,
    RpcWithProfilingResp,
    decode_head,
    encode_head,
    peek_call,
)
from telegrad.wire.profiling_messages import MEMORY, SHAPES, with_profile, with_profiling


@pytest.mark.parametrize(
    "request_head",
    [
        Request(7, "m:f", 2.5, True),
        RequestWithState(7, "m:f", 2.5, False, autocast=Autocast((("cpu", 1),), True), devices=(("cuda:0", "cuda:1"),)),
    ],
)
def test_a_request_that_asks_for_a_profile_keeps_its_fields(request_head: Request) -> None:
    head = decode_head(encode_head(with_profiling(request_head, SHAPES | MEMORY)))
    assert type(head) is RpcWithProfilingReq
    assert head.profiling == SHAPES | MEMORY
    for name in (*Request.__struct_fields__, "autocast", "devices"):
        assert getattr(head, name) == getattr(request_head, name)
    assert request_head.profiling is None


def test_responses_carry_profiles() -> None:
    reply = decode_head(encode_head(with_profile(Reply(7), b"what was recorded")))
    failure = decode_head(encode_head(with_profile(Failure(7, "T", "text", "trace", True), b"recorded")))
    assert type(reply) is RpcWithProfilingResp
    assert type(failure) is FailureWithProfiling
    assert (reply.call, reply.profile) == (7, b"what was recorded")
    assert (failure.text, failure.not_found, failure.profile) == ("text", True, b"recorded")
    assert Reply(7).profile == Failure(7, "T", "", "").profile == b""


def test_the_call_of_a_truncated_message_is_found() -> None:
    assert peek_call(encode_head(with_profiling(Request(7, "f", 0.0, False), 0))[:6]) == (32, 7)
