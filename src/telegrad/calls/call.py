"""The two ends of a call: `Call` on the worker that made it, `Served` on the worker that runs it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING

import msgspec

from telegrad.calls.extension import Context, Extension, OutgoingMessage, PlacedReference
from telegrad.calls.link_reader import Waiter
from telegrad.connection.peer_account import Held
from telegrad.connection.worker_record import WorkerRecord
from telegrad.errors import CallCancelled
from telegrad.execution.timers import Timer
from telegrad.wire.devices import DevicePairs
from telegrad.wire.frames import Message
from telegrad.wire.messages import Autocast, AutogradMetadata, Response, RRefAccess, StreamPosition

if TYPE_CHECKING:
    from telegrad.agent.agent import Agent
    from telegrad.connection.channel import Channel


class Call(msgspec.Struct, eq=False):
    """A call that this worker made. It ends once: with a reply, or with an error."""

    id: int
    channel: Channel
    worker: str
    function: str
    started: float
    deadline: float | None = None
    parent: Served | None = None
    on_done: Callable[[Call], None] | None = None
    """For asynchronous calls: runs on a worker thread, or, with `at_once`, on the thread that reads the reply."""
    at_once: bool = False
    """Whether `on_done` is short, never blocks and runs no user code."""
    charge: int = 0
    """The credits that it holds, in bytes; 0 if it is nested."""
    outgoing: OutgoingMessage | None = None
    """The request, if it concerned extensions."""
    timer: Timer | None = None
    waiters: list[Waiter] = msgspec.field(default_factory=list)
    """One for each waiting thread."""
    answer: Response | None = None
    message: Message | None = None
    references: Sequence[PlacedReference] = ()
    error: Exception | None = None

    def done(self) -> bool:
        """Return whether it has ended."""
        return self.answer is not None or self.error is not None

    def __str__(self) -> str:
        return f"call {self.id} of {self.function or 'a function by value'} on worker {self.worker!r}"


class Served(msgspec.Struct, eq=False):
    """A call that this worker runs for another."""

    agent: Agent
    channel: Channel
    id: int
    worker: WorkerRecord
    """The caller."""
    function: str
    started: float
    deadline: float | None
    charge: int
    autograd: AutogradMetadata | None = None
    context: Context | None = None
    """The autograd context that the call was made in."""
    extensions: tuple[Extension, ...] = ()
    """Those that the request concerned."""
    on_result: Callable[[object, BaseException | None], object] | None = None
    """Set by an extension: takes what the function returned or raised, and returns what the caller gets instead."""
    cancelled: str = ""
    """Why the caller gave the call up; empty while it waits."""
    children: dict[int, Call] = msgspec.field(default_factory=dict)
    on_cancel: Callable[[], None] | None = None
    answered: bool = False
    deferred: bool = False
    """The function returned a future, and the reply is its result."""
    rref_access: RRefAccess | None = None
    """What the call accesses, if it is a method call or `to_here` on a reference."""
    stream_position: StreamPosition | None = None
    """Its place in the caller's order of calls to an ordered object, until it has entered the object's queue."""
    autocast: Autocast | None = None
    """The caller's autocast state."""
    devices: DevicePairs = ()
    """The caller's device map for this worker."""
    held: Held | None = None
    """What it counts towards the limits of its caller, if that has any."""

    @property
    def caller(self) -> str:
        """The name of the calling worker."""
        return self.worker.name

    def give_up(self, answer: Callable[[object, BaseException | None], None]) -> None:
        """Answer a call that waits for something, if its caller gave it up: what it waits for may never come."""
        try:
            self.check()
        except CallCancelled as error:
            answer(None, error)

    def submit(self, task: Callable[[], None]) -> None:
        """Have a worker thread continue the call, when the limits of its caller allow it."""
        account, executor = self.channel.account, self.agent.executor
        if account is None:
            executor.submit(task)
        else:
            executor.submit_in(account.tasks, task)

    def check(self) -> None:
        """Raise CallCancelled if the caller gave the call up. Long functions may call this now and then."""
        if self.cancelled:
            raise CallCancelled(
                f"{self.function or 'a function'}, called by worker {self.caller!r}: {self.cancelled}",
                function=self.function,
                call=self.id,
            )


current_agent: ContextVar[Agent | None] = ContextVar("telegrad_acting", default=None)
"""The agent of the current thread or task, where it serves no call."""

current_served: ContextVar[Served | None] = ContextVar("telegrad_serving", default=None)
"""The call that the current thread or task serves."""
