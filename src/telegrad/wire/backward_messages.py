"""Messages of distributed backward passes and of their contexts."""

from __future__ import annotations

import msgspec

from telegrad.wire.call_messages import Autocast, AutogradMetadata
from telegrad.wire.descriptors import TensorDescriptor

GRADIENT, NONE, UNREACHED = 0, 1, 2
"""State of each tensor of a send: it has a gradient, the engine reached it without one, or did not reach it."""

INTO_CONTEXT, INTO_GRAD, NOWHERE = 0, 1, 2
"""Where a pass accumulates the gradients of leaves: in the context, in ``.grad``, or nowhere."""


ANOMALY, CHECK_NAN, PROFILED = 1, 2, 4
"""Modes of a pass: the error of a node says where the node was made; a node that returns NaN is an error; islands are
recorded for the profiler of the caller."""
PROFILING_OPTIONS = 3
"""Bits below the options of the profiler in the modes of a pass."""


class StepInPass(msgspec.Struct, frozen=True, array_like=True):
    """An optimizer that steps during a pass, as soon as the gradient of one of its leaves is final."""

    optimizer: int
    hyperparameters: bytes


class PassInfo(msgspec.Struct, frozen=True, array_like=True):
    """Parameters of a pass, identical on every participating worker."""

    context: int
    number: int
    """Unique: the worker that started the pass in the top 16 bits, a counter below."""
    retain_graph: bool
    create_graph: bool
    leaves: int
    steps: tuple[StepInPass, ...] = ()
    modes: int = 0
    """The modes of the caller: `ANOMALY`, `CHECK_NAN`, `PROFILED`. The options of its profiler are above those."""
    autocast: Autocast | None = None
    """The autocast state in which backward was called."""


class WorkerReport(msgspec.Struct, frozen=True, array_like=True):
    """The state of a worker when it becomes idle in a pass (see `telegrad.protocol.backward`)."""

    worker: int
    number: int
    partly_fed: bool


class PassFailure(msgspec.Struct, frozen=True, array_like=True):
    """Why a pass failed, and on which worker. The data of the message is the exception, if it can be encoded."""

    worker: int
    text: str
    traceback: str


class PiggybackedResp(msgspec.Struct, frozen=True, array_like=True):
    """A PropagateGradientsResp that is sent with its sender's last gradient. The fields have the same meaning."""

    call: int
    count: int
    reports: tuple[WorkerReport, ...]


class PropagateGradientsReq(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """The gradients of one send. Those that exist are attached, in order."""

    call: int
    """Identifies the message in its response; 0 if it is counted instead (see `telegrad.protocol.termination`)."""
    pass_info: PassInfo
    message: int
    states: tuple[int, ...]
    probe_done: bool
    """The probe of this pass is complete."""
    attachments: tuple[TensorDescriptor, ...] = ()
    autograd: AutogradMetadata | None = None
    """Set with create_graph: the gradients can be differentiated again."""
    reply_here: bool = False
    """The sender is reading this connection: the receiver may reply on it."""
    response: PiggybackedResp | None = None
    """The sender is done, and responds to the message that engaged it."""


class PropagateGradientsResp(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """The response to any message of a pass, sent according to Dijkstra and Scholten's rule."""

    context: int
    number: int
    """The number of the pass."""
    call: int
    count: int = 0
    """How many counted messages were sent to the receiver."""
    reports: tuple[WorkerReport, ...] = ()
    refusal: str = ""
    """Why the message was refused; empty if it was accepted."""
    failure: PassFailure | None = None
    """Set if the pass failed. The response may overtake AbortPass and must not look like success."""


class ProbeReq(msgspec.Struct, frozen=True, array_like=True, tag=7):
    """The probe reached these tensors of one send."""

    call: int
    pass_info: PassInfo
    message: int
    tensors: tuple[int, ...]


class LeadsToInputReq(msgspec.Struct, frozen=True, array_like=True, tag=24):
    """In a pass with inputs: these tensors of a message that the sender sent lead to an input."""

    call: int
    pass_info: PassInfo
    message: int
    tensors: tuple[int, ...]


class ResumeReq(msgspec.Struct, frozen=True, array_like=True, tag=8):
    """The probe is complete: run everything that waits for it."""

    call: int
    pass_info: PassInfo


class AbortPass(msgspec.Struct, frozen=True, array_like=True, tag=9):
    """A pass failed. Sent to every worker of the context, without a response. The data is the exception."""

    pass_info: PassInfo
    failure: PassFailure


class CleanupAutogradContextReq(msgspec.Struct, frozen=True, array_like=True, tag=10):
    """The context has ended. The sender made this many calls to the receiver in it."""

    context: int
    calls: int


class AdoptAutogradContext(msgspec.Struct, frozen=True, array_like=True, tag=23):
    """A worker that called the sender in the context is lost: its owner shall tell the sender when it ends."""

    context: int
