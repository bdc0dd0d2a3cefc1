"""All messages between authenticated workers, and their encoding.

Each is a frozen struct with a tag of its own. They are defined by subject in `call_messages`, `backward_messages` and
`rref_messages`, and imported from here. The messages of the handshake are in `handshake_messages`.
"""

from __future__ import annotations

import msgspec

from telegrad.errors import ProtocolError
from telegrad.wire.backward_messages import (
    ANOMALY,
    CHECK_NAN,
    GRADIENT,
    INTO_CONTEXT,
    INTO_GRAD,
    NONE,
    NOWHERE,
    PROFILED,
    PROFILING_OPTIONS,
    UNREACHED,
    AbortPass,
    AdoptAutogradContext,
    CleanupAutogradContextReq,
    LeadsToInputReq,
    PassFailure,
    PassInfo,
    PiggybackedResp,
    ProbeReq,
    PropagateGradientsReq,
    PropagateGradientsResp,
    ResumeReq,
    StepInPass,
    WorkerReport,
)
from telegrad.wire.call_messages import (
    ANOMALY_MODE,
    GRAD_MODE,
    Autocast,
    AutogradMetadata,
    Cancel,
    Failure,
    Reply,
    Request,
    RequestWithState,
)
from telegrad.wire.observe_messages import ObserveReq, ObserveResp
from telegrad.wire.profiling_messages import FailureWithProfiling, RpcWithProfilingReq, RpcWithProfilingResp
from telegrad.wire.relay_messages import DialBack
from telegrad.wire.rref_messages import (
    Creation,
    ForkInfo,
    RRefAccess,
    RRefBackwardReq,
    RRefBackwardResp,
    RRefChildAccept,
    RRefForkAccept,
    RRefForkRequest,
    RRefSkip,
    RRefUserDelete,
    StreamPosition,
)
from telegrad.wire.tracing_messages import TracedRequest

__all__ = [
    "ANOMALY",
    "ANOMALY_MODE",
    "CHECK_NAN",
    "GRADIENT",
    "GRAD_MODE",
    "INTO_CONTEXT",
    "INTO_GRAD",
    "NONE",
    "NOWHERE",
    "PROFILED",
    "PROFILING_OPTIONS",
    "RESPONSES",
    "UNREACHED",
    "AbortPass",
    "AdoptAutogradContext",
    "Autocast",
    "AutogradMetadata",
    "Cancel",
    "CleanupAutogradContextReq",
    "Creation",
    "Failure",
    "FailureWithProfiling",
    "ForkInfo",
    "Head",
    "LeadsToInputReq",
    "ObserveReq",
    "ObserveResp",
    "PassFailure",
    "PassInfo",
    "PiggybackedResp",
    "ProbeReq",
    "PropagateGradientsReq",
    "PropagateGradientsResp",
    "RRefAccess",
    "RRefBackwardReq",
    "RRefBackwardResp",
    "RRefChildAccept",
    "RRefForkAccept",
    "RRefForkRequest",
    "RRefSkip",
    "RRefUserDelete",
    "Reply",
    "Request",
    "RequestWithState",
    "Response",
    "ResumeReq",
    "RpcWithProfilingReq",
    "RpcWithProfilingResp",
    "StepInPass",
    "StreamPosition",
    "TracedRequest",
    "WorkerReport",
    "decode_head",
    "encode_head",
    "peek_call",
]

Head = (
    Request
    | RequestWithState
    | RpcWithProfilingReq
    | TracedRequest
    | Reply
    | Failure
    | RpcWithProfilingResp
    | FailureWithProfiling
    | Cancel
    | PropagateGradientsReq
    | PropagateGradientsResp
    | ProbeReq
    | LeadsToInputReq
    | ResumeReq
    | AbortPass
    | CleanupAutogradContextReq
    | AdoptAutogradContext
    | RRefForkRequest
    | RRefForkAccept
    | RRefChildAccept
    | RRefUserDelete
    | RRefSkip
    | RRefBackwardReq
    | RRefBackwardResp
    | DialBack
    | ObserveReq
    | ObserveResp
)
RESPONSES = (Reply, Failure, RRefBackwardResp, ObserveResp)
Response = Reply | Failure | RRefBackwardResp | ObserveResp

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Head] = msgspec.msgpack.Decoder(Head)

encode_head = _encoder.encode


def decode_head(data: bytes | bytearray | memoryview) -> Head:
    """Decode the head of a message. Raise ProtocolError for anything that is not a `Head`."""
    try:
        return _decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"invalid message head: {error}") from error


_SMALL, _SIZES = 0x80, {0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8}
"""How msgpack encodes integers: small ones as one byte, others after a byte that gives their size."""


def peek_call(head: bytes | memoryview) -> tuple[int, int] | None:
    """Return tag and first field of a possibly truncated head, or None if it does not start with two integers.

    For a message that cannot be decoded because there is no memory. The first field of a Request, a Reply and a
    Failure is the call's number.

    >>> peek_call(msgspec.msgpack.encode(Request(70000, "f", 0.0, False))[:8])
    (1, 70000)
    """
    data = bytes(head[:32])
    at = {0xDC: 3, 0xDD: 5}.get(data[0], 1) if data else 0  # after the header of the array
    found: list[int] = []
    while len(found) < 2 and at < len(data):
        size = 0 if data[at] < _SMALL else _SIZES.get(data[at])
        if size is None or at + size >= len(data):
            return None
        found.append(data[at] if not size else int.from_bytes(data[at + 1 : at + 1 + size], "big"))
        at += 1 + size
    return (found[0], found[1]) if len(found) == 2 else None
