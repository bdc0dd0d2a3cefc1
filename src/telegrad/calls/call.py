"""The two ends of a call: `Call` on the worker that made it, `Served` on the worker that runs it."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from contextvars import ContextVar
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from telegrad.calls.extension import Context, Extension, OutgoingMessage, PlacedReference
from telegrad.calls.link_reader import Waiter
from telegrad.calls.service_names import readable_name
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

Access = RRefAccess | Callable[[], RRefAccess]
"""What a call does with an RRef; for a call on an ordered object, a function that numbers it."""


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
    by_value: str = ""
    """The name of the function if it is sent by value."""
    rref_access: RRefAccess | None = None
    """The value and the method that it is for, if it is for those of an RRef."""
    at_once: bool = False
    """Whether `on_done` is short, never blocks and runs no user code."""
    charge: int = 0
    """The credits that it holds, in bytes; 0 if it is nested."""
    is_reserved: bool = False
    """Whether it took its credits before it was encoded, and the callee does not count it."""
    outgoing: OutgoingMessage | None = None
    """The request, if it concerned extensions."""
    on_response: Callable[[Call], None] | None = None
    """Set by an extension: called once the call has ended, before anybody who waits for it learns of that. Short."""
    timer: Timer | None = None
    waiters: list[Waiter] = msgspec.field(default_factory=list)
    """One for each waiting thread."""
    answer: Response | None = None
    message: Message | None = None
    references: Sequence[PlacedReference] = ()
    error: Exception | None = None
    sent: float = 0.0
    """When the request was sent; 0 while it is not."""
    size: int = 0
    """Bytes of the request that its credits count: those that went over the link."""
    shared: int = 0
    """Bytes of the request in shared memory."""
    thread: int = 0
    """The thread that made it."""
    context_id: int = 0
    """The autograd context that it was made in; 0 for none."""
    awaited: int = 0
    """How many coroutines wait for it now."""

    def when_ended(self, function: Callable[[Call], None]) -> None:
        """Have an extension's function called as well, see `on_response`."""
        before = self.on_response
        self.on_response = function if before is None else partial(_both, before, function)

    def done(self) -> bool:
        """Return whether it has ended."""
        return self.answer is not None or self.error is not None

    def name(self) -> str:
        """Return the name of the function, for people."""
        return readable_name(self.function, self.rref_access) or self.by_value or "a function by value"

    def __str__(self) -> str:
        return f"call {self.id} of {self.name()} on worker {self.worker!r}"


def _both(one: Callable[[Call], None], other: Callable[[Call], None], call: Call) -> None:
    try:
        one(call)
    finally:
        other(call)


class DeferredWait(msgspec.Struct, frozen=True):
    """What a served call waits for while no thread runs it."""

    kind: str
    """"queue", "value", or "reference"."""
    since: float
    about: Any
    """The queue, the reference, or the workers that it waits for."""


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
    around: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None
    """Set by an extension: takes the function, and returns what is called instead."""
    on_head: Callable[[Any], Any] | None = None
    """Set by an extension: takes the head of the response, and returns the one that is sent instead."""
    profiling: int | None = None
    """The options of the caller's profiler, if it has one."""
    trace: dict[str, str] | None = None
    """What OpenTelemetry on the caller sent with the call, if it is used there."""
    outcome: str = ""
    """The name of the class of what the function raised, once the call is answered."""
    cancelled: str = ""
    """Why the caller gave the call up; empty while it waits."""
    children: dict[int, Call] = msgspec.field(default_factory=dict)
    on_cancel: Callable[[], None] | None = None
    coroutine: Coroutine[Any, Any, Any] | None = None
    """What its function returned, while the event loop runs it."""
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
    received: int = 0
    """Bytes of the request."""
    running: float = 0.0
    """When a thread began to serve it; 0 while it is queued."""
    thread: int = 0
    """The thread that serves it, or did last."""
    creates: tuple[int, int, int] | None = None
    """The reference that it computes the value of."""
    waits: DeferredWait | None = None
    """What it waits for without a thread."""
    held: Held | None = None
    """What it counts towards the limits of its caller, if that has any."""
    owns_result: bool = False
    """Whether the function returned a tensor that nobody else holds."""

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
            name = readable_name(self.function, self.rref_access) or "a function"
            raise CallCancelled(
                f"{name}, called by worker {self.caller!r}: {self.cancelled}",
                function=self.function,
                call=self.id,
            )


current_agent: ContextVar[Agent | None] = ContextVar("telegrad_acting", default=None)
"""The agent of the current thread or task, where it serves no call."""

current_served: ContextVar[Served | None] = ContextVar("telegrad_serving", default=None)
"""The call that the current thread or task serves."""
