"""Calls: those that this worker made and waits for, and those that it serves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING

import msgspec

from telegrad.calls.keeper import Placed
from telegrad.calls.recorder import Scope
from telegrad.connection.worker_record import WorkerRecord
from telegrad.errors import CallCancelled
from telegrad.execution.executor import Timer
from telegrad.waiting import Event
from telegrad.wire.frames import Message
from telegrad.wire.messages import Autocast, AutogradMetadata, ForkInfo, Response, RRefAccess, StreamPosition

if TYPE_CHECKING:
    from telegrad.agent.agent import Agent
    from telegrad.connection.channel import Channel


class Call(msgspec.Struct, eq=False):
    """A call that this worker made. It ends once: with an answer, or with an error."""

    id: int
    channel: Channel
    worker: str
    function: str
    started: float
    deadline: float | None = None
    parent: Served | None = None
    on_done: Callable[[Call], None] | None = None
    """Asynchronous calls only; run by a runner, or, with `at_once`, by whoever reads the answer."""
    at_once: bool = False
    """Whether `on_done` is short, waits for nothing and runs nothing of the user's."""
    charge: int = 0
    """Credits taken for it, in bytes; 0 if nested."""
    recorded: AutogradMetadata | None = None
    """What the recorder made of it."""
    forks: tuple[ForkInfo, ...] = ()
    """What the keeper made of it."""
    timer: Timer | None = None
    waiters: list[Waiter] = msgspec.field(default_factory=list)
    """One for each thread that waits for it."""
    answer: Response | None = None
    message: Message | None = None
    references: Sequence[Placed] = ()
    error: Exception | None = None

    def done(self) -> bool:
        """Whether it has ended."""
        return self.answer is not None or self.error is not None

    def __str__(self) -> str:
        return f"call {self.id} of {self.function or 'a function by value'} on worker {self.worker!r}"


class Waiter(msgspec.Struct, eq=False):
    """A thread that waits for a call."""

    call: Call
    event: Event | None = None
    """There while it waits for another thread that reads."""
    leading: int = 0
    """The thread, while it reads the link itself."""

    def done(self) -> bool:
        """Whether the call has ended."""
        return self.call.answer is not None or self.call.error is not None


class Served(msgspec.Struct, eq=False):
    """A call that this worker runs for another."""

    agent: Agent
    id: int
    worker: WorkerRecord
    """The one that called."""
    function: str
    started: float
    deadline: float | None
    charge: int
    autograd: AutogradMetadata | None = None
    scope: Scope | None = None
    """The recorder's context that the call was made in."""
    cancelled: str = ""
    """Why the caller no longer wants the answer; empty if it does."""
    children: dict[int, Call] = msgspec.field(default_factory=dict)
    on_cancel: Callable[[], None] | None = None
    answered: bool = False
    deferred: bool = False
    """The function has returned a future, whose result is the answer."""
    visit: RRefAccess | None = None
    """Of a call of a method, or of `to_here`."""
    turn: StreamPosition | None = None
    """Of a call of an ordered object, until it waits for its turn there."""
    autocast: Autocast | None = None
    """The caller's."""

    @property
    def caller(self) -> str:
        """The name of the worker that called."""
        return self.worker.name

    def check(self) -> None:
        """Raise CallCancelled if the caller no longer wants the answer: long functions may call this now and then."""
        if self.cancelled:
            raise CallCancelled(
                f"{self.function or 'a function'}, called by worker {self.caller!r}: {self.cancelled}",
                function=self.function,
                call=self.id,
            )


current_agent: ContextVar[Agent | None] = ContextVar("telegrad_acting", default=None)
"""The agent that the current thread or task works for, where it serves no call."""

current_served: ContextVar[Served | None] = ContextVar("telegrad_serving", default=None)
"""The call that the current thread or task serves."""
