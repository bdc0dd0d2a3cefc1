"""Calls: those that this worker made and waits for, and those that it serves."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import TYPE_CHECKING

from telegrad.agent.executor import Timer
from telegrad.agent.keeper import Placed
from telegrad.agent.recorder import Scope
from telegrad.errors import CallCancelled
from telegrad.waiting import Event
from telegrad.wire.frames import Message
from telegrad.wire.messages import Answer, AutogradMetadata

if TYPE_CHECKING:
    from telegrad.agent.agent import Agent
    from telegrad.agent.channel import Channel


class Call:
    """A call that this worker made. It ends once: with an answer, or with an error."""

    __slots__ = (
        "answer",
        "channel",
        "charge",
        "deadline",
        "error",
        "event",
        "function",
        "id",
        "leading",
        "message",
        "on_done",
        "parent",
        "references",
        "started",
        "timer",
        "worker",
    )

    def __init__(self, call_id: int, channel: Channel, worker: str, function: str, started: float) -> None:
        self.id = call_id
        self.channel = channel
        self.worker = worker
        self.function = function
        self.started = started
        self.deadline: float | None = None
        self.charge = 0  # credits taken for it, in bytes; 0 if nested
        self.parent: Served | None = None
        self.on_done: Callable[[], None] | None = None  # asynchronous calls only; run by a runner
        self.timer: Timer | None = None
        self.event: Event | None = None  # set while a thread waits for another to read the answer
        self.leading = 0  # the thread that reads the link for this call
        self.answer: Answer | None = None
        self.message: Message | None = None
        self.references: list[Placed] = []
        self.error: Exception | None = None

    def done(self) -> bool:
        """Whether it has ended."""
        return self.answer is not None or self.error is not None

    def __str__(self) -> str:
        return f"call {self.id} of {self.function or 'a function by value'} on worker {self.worker!r}"


class Served:
    """A call that this worker runs for another."""

    __slots__ = (
        "agent",
        "autograd",
        "caller",
        "cancelled",
        "charge",
        "children",
        "deadline",
        "function",
        "id",
        "on_cancel",
        "scope",
        "started",
    )

    def __init__(
        self,
        agent: Agent,
        call_id: int,
        caller: str,
        function: str,
        started: float,
        deadline: float | None,
        charge: int,
    ) -> None:
        self.agent = agent
        self.id = call_id
        self.caller = caller
        self.function = function
        self.started = started
        self.deadline = deadline
        self.charge = charge
        self.autograd: AutogradMetadata | None = None
        self.scope: Scope | None = None
        """The recorder's context that the call was made in."""
        self.cancelled = ""
        """Why the caller no longer wants the answer; empty if it does."""
        self.children: dict[int, Call] = {}
        self.on_cancel: Callable[[], None] | None = None

    def check(self) -> None:
        """Raise CallCancelled if the caller no longer wants the answer: long functions may call this now and then."""
        if self.cancelled:
            raise CallCancelled(
                f"{self.function}, called by worker {self.caller!r}: {self.cancelled}",
                function=self.function,
                call=self.id,
            )


acting: ContextVar[Agent | None] = ContextVar("telegrad_acting", default=None)
"""The agent that the current thread or task works for, where it serves no call."""

serving: ContextVar[Served | None] = ContextVar("telegrad_serving", default=None)
"""The call that the current thread or task serves."""
