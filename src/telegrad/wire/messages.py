"""The whole vocabulary: one frozen struct per message.

A message's values travel outside its struct, as pickled data and a region of tensor contents (see `frames`);
`attachments` describes that region.
"""

from __future__ import annotations

from typing import ClassVar

import msgspec

from telegrad.errors import ProtocolError
from telegrad.wire.descriptors import TensorDescriptor


class AutogradMetadata(msgspec.Struct, frozen=True, array_like=True):
    """What a call or a reply that is made in a context carries. With it, a message is PyTorch's RpcWithAutograd."""

    context: int
    message: int = 0
    """Pairs a SendRpcBackward with its RecvRpcBackward; 0: no tensor of the message needs a gradient."""
    tensors: tuple[int, ...] = ()
    """Which attachments need one, in the order of the send's tensors."""
    grad_mode: bool = True
    """Whether the caller had grad mode on; if not, the function runs without it, too."""


class Autocast(msgspec.Struct, frozen=True, array_like=True):
    """The autocast of a thread."""

    devices: tuple[tuple[str, int], ...]
    """For each kind of device that it is for, the dtype to cast to (as in `telegrad.wire.descriptors`)."""
    cache: bool
    """Whether casts of weights are kept."""


ForkId = tuple[int, int]
ReferenceId = tuple[int, int, int]


class ForkInfo(msgspec.Struct, frozen=True, array_like=True):
    """A reference that travels in a message; the sender passes it on (see `telegrad.protocol.ownership`)."""

    position: int
    """Among the attachments, where the value is put together again."""
    rref: ReferenceId
    fork: ForkId
    owner: int
    ordered: bool = False


class Creation(msgspec.Struct, frozen=True, array_like=True):
    """What makes a call a ``remote``: its result stays with the callee, under this name."""

    rref: ReferenceId
    fork: ForkId
    ordered: bool = False
    """Methods of the value run one at a time, in each caller's order."""
    after: int = -1
    """The counter of the reference that this caller created before it on the same owner; -1: none."""


class Turn(msgspec.Struct, frozen=True, array_like=True):
    """The place of a call in its caller's order, where the object that it calls takes calls in order."""

    rref: ReferenceId
    stream: int
    """Which only this caller uses, in this life of it."""
    number: int


class Visit(msgspec.Struct, frozen=True, array_like=True):
    """What makes a call one of a value that the callee keeps: of which, and of which of its methods."""

    rref: ReferenceId
    method: str
    """Its name; empty, if it is not a call of a method: the first argument is a function that gets the value before the
    other arguments, or the value itself is wanted."""
    turn: Turn | None = None


class Request(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Run a function, and answer with a Reply or a Failure."""

    call: int
    function: str
    """``module:qualname``; ``@name`` for a function that was registered under a name; empty if it is in the data."""
    timeout: float
    """Seconds until the caller stops waiting; 0: it waits for as long as it takes."""
    nested: bool
    """Made while the caller itself was serving a call: no credits are taken, or nesting could deadlock."""
    attachments: tuple[TensorDescriptor, ...] = ()
    autograd: AutogradMetadata | None = None
    references: tuple[ForkInfo, ...] = ()
    creation: Creation | None = None
    visit: Visit | None = None

    autocast: ClassVar[Autocast | None] = None


class RequestInAutocast(Request, frozen=True, array_like=True, tag=30):
    """A request of a caller that is in autocast: the function runs in the same. Other requests need no room for it."""

    autocast: Autocast | None = None  # type: ignore[misc]  # a field here, None in all other requests


class Reply(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """The function returned; the data is its result."""

    call: int
    attachments: tuple[TensorDescriptor, ...] = ()
    autograd: AutogradMetadata | None = None
    references: tuple[ForkInfo, ...] = ()


class Failure(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """The function raised, or could not be run. The data is the pickled exception, if it could be pickled."""

    call: int
    type_name: str
    text: str
    traceback: str
    not_found: bool = False
    """The callee has no such function."""
    attachments: tuple[TensorDescriptor, ...] = ()


class Cancel(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """The caller no longer wants the answer."""

    call: int
    reason: str


# -- the backward pass ----------------------------------------------------------------------------------------

GRADIENT, NONE, UNREACHED = 0, 1, 2
"""What a gradient message says of each tensor of a send: here it is; the engine reached it without one; not reached."""

INTO_CONTEXT, INTO_GRAD, NOWHERE = 0, 1, 2
"""Where a pass puts the gradients of leaves: into the context, into ``.grad``, or nowhere."""


class StepInPass(msgspec.Struct, frozen=True, array_like=True):
    """An optimizer that steps in a pass, wherever the gradient of one of its leaves becomes final."""

    optimizer: int
    hyperparameters: bytes


class PassInfo(msgspec.Struct, frozen=True, array_like=True):
    """One pass, the same on every worker that takes part."""

    context: int
    number: int
    """Unique: the worker that began it in the top 16 bits, a counter below."""
    retain_graph: bool
    create_graph: bool
    leaves: int
    steps: tuple[StepInPass, ...] = ()
    check_nan: bool = False
    """The caller is in anomaly mode: a node that returns NaN is an error."""
    autocast: Autocast | None = None
    """In which backward was called."""


class WorkerReport(msgspec.Struct, frozen=True, array_like=True):
    """What a worker says of itself when it falls idle in a pass (see `telegrad.protocol.backward`)."""

    worker: int
    number: int
    partly_fed: bool


class PassFailure(msgspec.Struct, frozen=True, array_like=True):
    """Why a pass failed, and on which worker. The data of the message is the exception itself, if it can be pickled."""

    worker: int
    text: str
    traceback: str


class LastWord(msgspec.Struct, frozen=True, array_like=True):
    """An answer that rides on the last gradient that its sender has to send: its fields say what the answer's do."""

    call: int
    count: int
    reports: tuple[WorkerReport, ...]


class PropagateGradientsReq(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """The gradients of one send. Those that are there follow as attachments, in order."""

    call: int
    """Names the message in its answer; 0: it is counted, and needs none (see `telegrad.protocol.termination`)."""
    about: PassInfo
    message: int
    states: tuple[int, ...]
    known: bool
    """The probe of this pass is over."""
    attachments: tuple[TensorDescriptor, ...] = ()
    autograd: AutogradMetadata | None = None
    """With create_graph, the gradients can be differentiated again."""
    back: bool = False
    """The sender reads the connection that brings this: what its receiver has to say to it may come back there."""
    answer: LastWord | None = None
    """The sender is done, and answers the message that engaged it."""


class PropagateGradientsResp(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """The answer to any message of a pass; it comes when Dijkstra and Scholten's rule says so."""

    context: int
    number: int
    """Of the pass."""
    call: int
    count: int = 0
    """How many counted messages the receiver has been sent."""
    reports: tuple[WorkerReport, ...] = ()
    refusal: str = ""
    """Why the message could not be taken; empty if it was."""
    failure: PassFailure | None = None
    """The pass has failed. The answer says so itself: it may overtake AbortPass, and must not look like success."""


class ProbeReq(msgspec.Struct, frozen=True, array_like=True, tag=7):
    """The probe has met these tensors of one send."""

    call: int
    about: PassInfo
    message: int
    tensors: tuple[int, ...]


class LeadsReq(msgspec.Struct, frozen=True, array_like=True, tag=24):
    """In a pass with inputs: these tensors, which the sender of this sent in a message, lead to an input."""

    call: int
    about: PassInfo
    message: int
    tensors: tuple[int, ...]


class ResumeReq(msgspec.Struct, frozen=True, array_like=True, tag=8):
    """The probe is over: start what waits."""

    call: int
    about: PassInfo


class AbortPass(msgspec.Struct, frozen=True, array_like=True, tag=9):
    """A pass has failed. Goes to every worker of the context; nobody answers. The data is the exception."""

    about: PassInfo
    failure: PassFailure


class CleanupAutogradContextReq(msgspec.Struct, frozen=True, array_like=True, tag=10):
    """The context has ended, and the sender made so many calls to the receiver in it."""

    context: int
    calls: int


class AdoptAutogradContext(msgspec.Struct, frozen=True, array_like=True, tag=23):
    """One that called the sender in the context is lost: its owner, who gets this, is to say when it has ended."""

    context: int


# -- references -----------------------------------------------------------------------------------------------


class RRefForkRequest(msgspec.Struct, frozen=True, array_like=True, tag=18):
    """A user asks the owner to accept the fork that it was passed."""

    rref: ReferenceId
    fork: ForkId


class RRefForkAccept(msgspec.Struct, frozen=True, array_like=True, tag=19):
    """The owner knows of the fork, or has nothing under that name any more."""

    fork: ForkId
    refused: bool


class RRefChildAccept(msgspec.Struct, frozen=True, array_like=True, tag=20):
    """The owner knows of the fork that the receiver of this message passed on."""

    fork: ForkId


class RRefUserDelete(msgspec.Struct, frozen=True, array_like=True, tag=21):
    """A user has dropped a fork."""

    rref: ReferenceId
    fork: ForkId


class RRefSkip(msgspec.Struct, frozen=True, array_like=True, tag=22):
    """A call of an ordered object was never sent."""

    turn: Turn
    last: bool = False
    """Nor will any after it: the sender has no handle any more."""


class RRefBackwardReq(msgspec.Struct, frozen=True, array_like=True, tag=16, forbid_unknown_fields=True):
    """Run a backward pass from a value that the receiver owns: exactly these three fields, as in PyTorch."""

    call: int
    rref: ReferenceId
    context: int
    retain_graph: bool


class RRefBackwardResp(msgspec.Struct, frozen=True, array_like=True, tag=17):
    """It ran."""

    call: int


Head = (
    Request
    | RequestInAutocast
    | Reply
    | Failure
    | Cancel
    | PropagateGradientsReq
    | PropagateGradientsResp
    | ProbeReq
    | LeadsReq
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
)
ANSWERS = (Reply, Failure, RRefBackwardResp)
Answer = Reply | Failure | RRefBackwardResp

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Head] = msgspec.msgpack.Decoder(Head)

encode_head = _encoder.encode


def decode_head(data: bytes | bytearray | memoryview) -> Head:
    """Read a head. What is not one of the structs above is a ProtocolError."""
    try:
        return _decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"a message head that cannot be read: {error}") from error


# -- before the peer has proved itself ------------------------------------------------------------------------


class Hello(msgspec.Struct, frozen=True, array_like=True, tag=11):
    """The first frame on a connection, from the worker that opened it."""

    name: str
    id: int
    incarnation: int
    addresses: tuple[str, ...]
    main: str
    target: str
    nonce: bytes
    has_token: bool


class Challenge(msgspec.Struct, frozen=True, array_like=True, tag=12):
    """The answer of the worker that was connected to, with its proof."""

    name: str
    id: int
    incarnation: int
    nonce: bytes
    proof: bytes


class Proof(msgspec.Struct, frozen=True, array_like=True, tag=13):
    """The opener's proof, and what of this session has reached it before."""

    proof: bytes
    session: int
    """Chosen by the opener; a reconnect names the session that it goes on with."""
    received: tuple[int, int]
    fresh: bool
    """The opener has no such session from before: a listener that has one must not go on with it."""


class Welcome(msgspec.Struct, frozen=True, array_like=True, tag=14):
    """The listener lets the opener in, and says what of this session has reached it before."""

    received: tuple[int, int]


class Reject(msgspec.Struct, frozen=True, array_like=True, tag=15):
    """Either side ends the handshake, and says why."""

    code: str
    reason: str


Greeting = Hello | Challenge | Proof | Welcome | Reject

_greeting_decoder: msgspec.msgpack.Decoder[Greeting] = msgspec.msgpack.Decoder(Greeting)


def decode_greeting(data: bytes | bytearray | memoryview) -> Greeting:
    """Read a handshake message. What is not one is a ProtocolError."""
    try:
        return _greeting_decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"a handshake message that cannot be read: {error}") from error


_SMALL, _SIZES = 0x80, {0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8}
"""How msgpack writes whole numbers: small ones as themselves, others after a byte that tells their size."""


def call_of(head: bytes | memoryview) -> tuple[int, int] | None:
    """Tag and first field of a head, of which the beginning is enough; None: it does not begin with two numbers.

    For a message that cannot be decoded because there is no memory. The first field of a Request, a Reply and a
    Failure is the call's number.

    >>> call_of(msgspec.msgpack.encode(Request(70000, "f", 0.0, False))[:8])
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
