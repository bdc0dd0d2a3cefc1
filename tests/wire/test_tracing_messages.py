from __future__ import annotations

import msgspec
import pytest

from telegrad.errors import ProtocolError
from telegrad.wire.messages import Autocast, Request, RequestWithState, decode_head, encode_head
from telegrad.wire.profiling_messages import with_profiling
from telegrad.wire.tracing_messages import TracedRequest, with_trace

TRACE = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}
PLAIN = Request(7, "m:f", 1.5, True)
WITH_STATE = RequestWithState(7, "m:f", 0.0, False, (), None, (), None, None, Autocast((("cpu", 1),), True), ())


@pytest.mark.parametrize("request_", [PLAIN, WITH_STATE])
def test_a_request_keeps_all_its_fields_and_carries_the_span(request_: Request) -> None:
    traced = with_trace(request_, TRACE)
    for name in (*RequestWithState.__struct_fields__, "profiling"):
        assert getattr(traced, name) == getattr(request_, name)
    assert decode_head(encode_head(traced)) == traced
    assert traced.trace == TRACE
    assert request_.trace is None


def test_a_call_can_be_traced_and_profiled_in_either_order() -> None:
    one, other = with_profiling(with_trace(WITH_STATE, TRACE), 3), with_trace(with_profiling(WITH_STATE, 3), TRACE)
    assert one == other
    assert isinstance(one, TracedRequest)
    assert (one.profiling, one.trace, one.autocast) == (3, TRACE, WITH_STATE.autocast)
    assert decode_head(encode_head(one)) == one


def test_a_trace_that_is_no_text_is_refused() -> None:
    with pytest.raises(ProtocolError):
        decode_head(
            msgspec.msgpack.encode([35, 7, "f", 0.0, False, [], None, [], None, None, None, [], None, {"a": 1}])
        )
