"""Messages of calls that are profiled (PyTorch's RpcWithProfilingReq and RpcWithProfilingResp).

The request says what the callee records while the function runs. The response carries what it recorded, as bytes that
`telegrad.wire.profiles` encodes: plain data, in registered mode as well. A call that is not profiled travels as a
`Request` and a `Reply` and pays nothing for this.
"""

from __future__ import annotations

from typing import Any

import msgspec

from telegrad.wire.call_messages import Failure, Reply, Request, RequestWithState
from telegrad.wire.tracing_messages import TracedRequest

SHAPES, MEMORY, FLOPS, STACKS = 1, 2, 4, 8
"""What a profiler records besides names and times. Options are the sum of these."""


class RpcWithProfilingReq(RequestWithState, frozen=True, array_like=True, tag=32):
    """A request whose caller profiles: the callee records what the function does."""

    profiling: int = 0  # type: ignore[misc]  # a field here, None in all other requests
    """The options of the caller's profiler."""


class RpcWithProfilingResp(Reply, frozen=True, array_like=True, tag=33):
    """A reply to such a request."""

    profile: bytes = b""  # type: ignore[misc]  # a field here, empty in all other replies
    """What was recorded; empty if the callee does not profile for others."""


class FailureWithProfiling(Failure, frozen=True, array_like=True, tag=34):
    """The function of such a request raised."""

    profile: bytes = b""  # type: ignore[misc]  # as above
    """What was recorded until then."""


def with_profiling(request: Request, options: int) -> RequestWithState:
    """Return a request that asks for a profile."""
    if isinstance(request, TracedRequest):
        return msgspec.structs.replace(request, profiling=options)
    state = (request.autocast, request.devices)
    common = [getattr(request, name) for name in Request.__struct_fields__]
    make: Any = RpcWithProfilingReq  # to mypy its last field is none
    request_with: RpcWithProfilingReq = make(*common, *state, options)
    return request_with


def with_profile(response: Reply | Failure, profile: bytes) -> RpcWithProfilingResp | FailureWithProfiling:
    """Return a response that carries a profile."""
    make: Any = RpcWithProfilingResp if isinstance(response, Reply) else FailureWithProfiling
    response_with: RpcWithProfilingResp | FailureWithProfiling = make(*msgspec.structs.astuple(response), profile)
    return response_with
