"""Messages of remote calls: a request, its response, and its cancellation.

Like all messages, these structs carry no values. Arguments and results travel next to the struct, as encoded data and
a region of tensor contents (see `frames`). `attachments` describes that region.
"""

from __future__ import annotations

from typing import ClassVar

import msgspec

from telegrad.wire.descriptors import TensorDescriptor
from telegrad.wire.devices import DevicePairs
from telegrad.wire.rref_messages import Creation, ForkInfo, RRefAccess

GRAD_MODE, ANOMALY_MODE = 1, 2
"""Modes of autograd: operations are recorded, and with where they were made."""


class AutogradMetadata(msgspec.Struct, frozen=True, array_like=True):
    """Autograd data of a request or reply in a context (PyTorch's RpcWithAutograd)."""

    context: int
    message: int = 0
    """Pairs a SendRpcBackward with its RecvRpcBackward; 0 if no tensor of the message needs a gradient."""
    tensors: tuple[int, ...] = ()
    """Indices of the attachments that need a gradient, in the order of the send's tensors."""
    modes: int = GRAD_MODE
    """The modes of autograd that the caller was in: `GRAD_MODE`, `ANOMALY_MODE`. The function runs in the same."""
    devices: tuple[str, ...] = ()
    """The devices that these tensors were sent from, for their gradients; empty if it is the CPU for all of them."""


class Autocast(msgspec.Struct, frozen=True, array_like=True):
    """The autocast state of a thread."""

    devices: tuple[tuple[str, int], ...]
    """Each device type with autocast enabled, and the code of its dtype (see `telegrad.wire.descriptors`)."""
    cache: bool
    """Whether casts of weights are cached."""


class Request(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Run a function and respond with a Reply or a Failure."""

    call: int
    function: str
    """``module:qualname``, ``@name`` for a function registered under a name, or empty if the data contains it. In
    registered mode, a name that the callee has exposed."""
    timeout: float
    """Seconds until the caller stops waiting; 0 if it waits forever."""
    nested: bool
    """Made while the caller itself was running a call. It takes no credits, because nesting could deadlock."""
    attachments: tuple[TensorDescriptor, ...] = ()
    autograd: AutogradMetadata | None = None
    references: tuple[ForkInfo, ...] = ()
    creation: Creation | None = None
    rref_access: RRefAccess | None = None

    autocast: ClassVar[Autocast | None] = None
    devices: ClassVar[DevicePairs] = ()
    profiling: ClassVar[int | None] = None
    trace: ClassVar[dict[str, str] | None] = None


class RequestWithState(Request, frozen=True, array_like=True, tag=30):
    """A request that carries state of its caller which most requests have none of."""

    autocast: Autocast | None = None  # type: ignore[misc]  # a field here, None in all other requests
    """The function runs in the same autocast state."""
    devices: DevicePairs = ()  # type: ignore[misc]  # as above
    """The caller's device map for the callee. The reply follows its reverse."""


class Reply(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """The function returned. The data is its result."""

    call: int
    attachments: tuple[TensorDescriptor, ...] = ()
    autograd: AutogradMetadata | None = None
    references: tuple[ForkInfo, ...] = ()

    profile: ClassVar[bytes] = b""


class Failure(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """The function raised or could not be run. The data is the exception, if it could be encoded."""

    call: int
    type_name: str
    text: str
    traceback: str
    not_found: bool = False
    """The callee has no such function."""
    attachments: tuple[TensorDescriptor, ...] = ()

    references: ClassVar[tuple[ForkInfo, ...]] = ()
    profile: ClassVar[bytes] = b""


class Cancel(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """The caller no longer waits for the response."""

    call: int
    reason: str
