"""Messages that create, access, share and delete RRefs (see `telegrad.protocol.ownership` for the rules)."""

from __future__ import annotations

from typing import ClassVar

import msgspec

ForkId = tuple[int, int]
RRefId = tuple[int, int, int]


class ForkInfo(msgspec.Struct, frozen=True, array_like=True):
    """An RRef inside a message: the sender shares it with the receiver."""

    position: int
    """Its index among the attachments and RRefs of the value."""
    rref: RRefId
    fork: ForkId
    owner: int
    ordered: bool = False


class Creation(msgspec.Struct, frozen=True, array_like=True):
    """Makes a request a ``remote``: the callee keeps the result as the value of this RRef."""

    rref: RRefId
    fork: ForkId
    ordered: bool = False
    """Methods of the value run one at a time, in each caller's order."""
    after: int = -1
    """The counter of the RRef that this caller created before it on the same owner; -1 if there is none."""


class StreamPosition(msgspec.Struct, frozen=True, array_like=True):
    """The position of a call in its caller's stream of calls to an ordered RRef."""

    rref: RRefId
    stream: int
    """Identifies the stream. Only one incarnation of one caller uses it."""
    number: int


class RRefAccess(msgspec.Struct, frozen=True, array_like=True):
    """Makes a request operate on the value of an RRef that the callee owns."""

    rref: RRefId
    method: str
    """The method to call. If empty, the first argument is a function that is called with the value and the other
    arguments. Without arguments, the value itself is returned. In registered mode ``:`` and the name of an operation of
    telegrad (see `telegrad.calls.registry`)."""
    stream_position: StreamPosition | None = None


class RRefForkRequest(msgspec.Struct, frozen=True, array_like=True, tag=18):
    """A user asks the owner to register a fork that it received."""

    rref: RRefId
    fork: ForkId


class RRefForkAccept(msgspec.Struct, frozen=True, array_like=True, tag=19):
    """The owner registered the fork, or refused it because the RRef no longer exists."""

    fork: ForkId
    refused: bool


class RRefChildAccept(msgspec.Struct, frozen=True, array_like=True, tag=20):
    """The owner registered a fork that the receiver of this message shared."""

    fork: ForkId


class RRefUserDelete(msgspec.Struct, frozen=True, array_like=True, tag=21):
    """A user deleted its fork."""

    rref: RRefId
    fork: ForkId


class RRefSkip(msgspec.Struct, frozen=True, array_like=True, tag=22):
    """A call to an ordered RRef was never sent: the owner must not wait for it."""

    stream_position: StreamPosition
    last: bool = False
    """No later call will be sent either: the sender has no more handles."""


class RRefBackwardReq(msgspec.Struct, frozen=True, array_like=True, tag=16, forbid_unknown_fields=True):
    """Run a backward pass from a value that the receiver owns. The fields are those of PyTorch's message."""

    call: int
    rref: RRefId
    context: int
    retain_graph: bool


class RRefBackwardResp(msgspec.Struct, frozen=True, array_like=True, tag=17):
    """The backward pass of an RRefBackwardReq is complete."""

    references: ClassVar[tuple[ForkInfo, ...]] = ()

    call: int
