"""The interface through which packages extend messages: autograd records tensors, references record forks.

Calls know neither gradients nor ownership. A package that adds something to messages implements `Extension`, and adds
it to the agent's `Pipeline`, saying which messages concern it. Messages that concern no extension skip this file, so a
plain call pays nothing.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import msgspec

from telegrad.connection.peer_account import PeerAccount
from telegrad.connection.worker_record import WorkerRecord
from telegrad.wire.encoded import Encoded
from telegrad.wire.messages import AutogradMetadata, Creation, ForkInfo, StreamPosition
from telegrad.wire.reference import Reference

if TYPE_CHECKING:
    from telegrad.calls.call import Call, Served

PlacedReference = tuple[int, Reference]
"""A reference and its position among the attachments of a message."""

Context = Any
"""What messages are sent in: a context of distributed autograd, which only the autograd extension looks into."""

current_context: ContextVar[Context | None] = ContextVar("telegrad_autograd_context", default=None)
"""The context of the current thread or task."""


@contextmanager
def outside_of_contexts() -> Iterator[None]:
    """Record nothing for autograd in the block: who receives the values of a collective is not in the same context."""
    token = current_context.set(None)
    try:
        yield
    finally:
        current_context.reset(token)


class Concern(enum.IntFlag):
    """Which messages an extension is asked about."""

    CONTEXT = 1
    """Those sent in a context."""
    REFERENCES = 2
    """Those that carry or create references, and calls of ordered objects."""
    PROFILING = 8
    """Requests whose callers profile."""
    ALL = 4
    """All requests and replies. Messages without values, such as cancellations and acknowledgements, and gradients that
    are not recorded pass no extension."""


class OutgoingMessage(msgspec.Struct, eq=False):
    """A message that has been encoded and has not left. Extensions fill in what travels with it."""

    peer: WorkerRecord
    encoded: Encoded
    context: Context | None
    is_request: bool
    autograd: AutogradMetadata | None = None
    forks: tuple[ForkInfo, ...] = ()
    call: Call | None = None
    """Of a request."""


class IncomingMessage(msgspec.Struct, eq=False):
    """A message that has arrived. Extensions turn what traveled with it into edges and references."""

    peer: WorkerRecord
    autograd: AutogradMetadata | None = None
    attachments: list[Any] = []
    """The tensors; only once they are decoded, for `Extension.incoming`."""
    forks: Sequence[ForkInfo] = ()
    references: list[PlacedReference] = []
    """What `Extension.arrived` makes of the forks. Whoever drops the message drops the references."""
    creation: Creation | None = None
    """Of a request whose result stays on this worker."""
    proceed: Callable[[], None] | None = None
    """Of a request: serves it. For an extension that holds the request back, see `Extension.arrived`."""
    served: Served | None = None
    """Of a request."""
    stream_position: StreamPosition | None = None
    """Of a refused request: its place in the caller's order of calls to an ordered object."""
    account: PeerAccount | None = None
    """Of a refused request: what its caller uses of this worker."""


class Extension:
    """Adds something to messages. Every method may be left as it is. An exception is a bug, except in `outgoing`."""

    serves = False
    """Whether `serve` does anything."""
    heads = False
    """Whether `heading` does anything."""

    def outgoing(self, message: OutgoingMessage) -> None:
        """A message has been encoded; nothing has left yet. An exception fails the message before it is sent."""

    def heading(self, message: OutgoingMessage, head: Any) -> Any:
        """Return the head that a message leaves with: this one, or one with more in it."""
        return head

    def unsent(self, message: OutgoingMessage) -> None:
        """Undo `outgoing`: the message did not leave. Also called if an `outgoing` raised, even before this one's."""

    def arrived(self, message: IncomingMessage) -> bool:
        """A message with references arrived. Called once for each, even if nobody waits for it any more.

        Return False to hold a request back, and call `message.proceed` when it can be served. Only one extension may
        hold requests back.
        """
        return True

    def check(self, message: IncomingMessage, account: PeerAccount) -> None:
        """Raise LimitExceeded if a request with references exceeds a limit of its peer. Called before `arrived`."""

    def refused(self, message: IncomingMessage) -> None:
        """A request was refused: it has not arrived, and will not be served."""

    def incoming(self, message: IncomingMessage) -> None:
        """The tensors of a message have been decoded; the values that hold them have not."""

    def serve(self, served: Served, function: Callable[[], None]) -> None:
        """Serve a call by calling `function` on this thread."""
        function()

    def answered(self, served: Served) -> None:
        """The reply to a call has left, or could not be delivered."""
