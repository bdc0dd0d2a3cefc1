"""One backward pass on one worker: the state that its stages share, and its failure.

The rules are in `telegrad.protocol.backward`. The stages are functions on a `PassRun`, and each module uses only those
before it in this list, so a pass has no reference cycles and its tensors are freed at once:

- `outgoing` sends gradients and other messages to the workers that wait for them.
- `island_runs` runs an island with torch's engine.
- `effects` carries out what the rules ask for.
- `probe` finds out which entries the pass reaches.
- `incoming` takes the messages of other workers.
- `driver` is the thread inside backward(), where the pass begins.
"""

from __future__ import annotations

import copy
import itertools
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from threading import get_ident

import msgspec
import torch

from telegrad.backward.contexts import DistAutogradContext
from telegrad.backward.engine_call import EngineCall
from telegrad.backward.failure import PassAborted, as_failure, broadcast, deadline_exceeded
from telegrad.backward.graph import PassGraph, Roots
from telegrad.backward.island_engine import IslandEngine
from telegrad.backward.messaging import PassMessaging, ReplyTo
from telegrad.backward.nodes import SendRpcBackward
from telegrad.backward.reentrant import InnerLeaves
from telegrad.calls.link_reader import Waiter
from telegrad.connection.channel import Channel
from telegrad.interrupts import shielded
from telegrad.protocol.backward import Acknowledge, BackwardPass, IdleReport, PassEffect
from telegrad.waiting import Event
from telegrad.wire.messages import PassInfo, PropagateGradientsReq

OnReply = Callable[[dict[int, IdleReport], int, int], list[PassEffect[ReplyTo]]]
"""Passes a reply to the rules: the reports in it, who sent it, and its count of messages that need no reply."""


class GradientMessage(msgspec.Struct):
    """Gradients that are ready to be sent."""

    to: int
    head: Callable[..., PropagateGradientsReq]
    """Makes the message head from descriptors of the gradients."""
    grads: Sequence[torch.Tensor]
    devices: Sequence[str]
    """The devices of the receiver that they go to; empty if it is the CPU for all of them."""
    back: Channel | None
    """The channel on which the receiver reads them, if it said so."""
    driver_reads: bool
    """Whether the driver reads the reply on the channel that takes the message."""


class Outbox(msgspec.Struct, eq=False):
    """The sending side of a pass. The lock of the pass protects all fields but `held`."""

    numbers: itertools.count[int]
    """Numbers of messages that are replied to."""
    unanswered: dict[int, tuple[int, OnReply]] = msgspec.field(default_factory=dict)
    """By number: the worker that replies, and what to do then."""
    read_from: int | None = None
    """The worker whose replies the driver reads itself."""
    driver_channel: Channel | None = None
    """The channel on which it reads them."""
    back: dict[int, Channel] = msgspec.field(default_factory=dict)
    """Channels on which other workers read what this worker sends to them."""
    held: dict[int, GradientMessage | None] = msgspec.field(default_factory=dict)
    """Gradients that wait for the end of their island, by message. Changed by single operations, without the lock."""


class PassRun:
    """One pass on one worker."""

    def __init__(
        self, messaging: PassMessaging, context: DistAutogradContext, info: PassInfo, roots: Roots | None = None
    ) -> None:
        self.context = context
        self.info = info
        self.messaging = messaging
        self.begun_here = roots is not None
        # Protects everything below, and the graph. Not held while torch's engine or user code runs. Walks of the graph
        # hold it, which call torch only to read nodes and leaves.
        self.lock = lock = threading.Lock()
        self.failure: Exception | None = None
        self.rules: BackwardPass[ReplyTo] = BackwardPass(messaging.me)
        hooks = messaging.accumulate_hooks
        self.graph = PassGraph(context, info, roots, hooks)
        call = EngineCall(self.graph, context, info, messaging.accumulate_through, hooks)
        self.engine = IslandEngine(self.graph, context, info, lock, call)
        self.outbox = Outbox(itertools.count(1))
        self.gates: dict[int, Event] = {}
        """Gates that wait for a gradient, by message."""
        self.todo: deque[PassEffect[ReplyTo]] = deque()
        """Effects for the driver."""
        self.wakeup: Waiter | None = None
        """Wakes the driver."""
        self.over = False
        self.driver_thread = 0
        """The thread inside backward(), if the pass began here."""
        self.deadline: float | None = None
        """The deadline of that thread."""
        self.slot_waits: dict[int, Event] = {}
        """Threads that wait for ``.grad`` of a leaf."""
        self.inner: dict[int, InnerLeaves] = {}
        """Leaves of backward passes inside this one, by the thread of the island. Changed by single operations,
        without the lock."""

    def reply(self, reply_to: ReplyTo) -> None:
        """Reply to a message, with what is known of all workers."""
        with self.lock:
            reports, failure, count = self.rules.reports(), self.failure, self.rules.count_for(reply_to[0])
        self.messaging.reply(self.info, reply_to, count, reports, failure)

    def wait_for_gradient(self, send: SendRpcBackward) -> None:
        """Wait in a gate for the gradient of a send, which is sure to come."""
        with self.lock:
            event = None
            if send.message not in self.graph.fed and self.failure is None:
                event = self.gates.setdefault(send.message, self.messaging.runtime.event())
        if event is not None:
            self.messaging.wait(event, None)
        with self.lock:
            if self.failure is not None:
                raise PassAborted("the pass has failed")
            send.set_grads(self.graph.fed[send.message].grads)

    def wait_for_slot(self, event: Event) -> None:
        """Wait in an island until a leaf's ``.grad`` may be used."""
        thread = get_ident()
        with self.lock:
            if self.failure is None:
                self.slot_waits[thread] = event
        try:
            if self.failure is None and not self.messaging.wait(event, self.deadline):
                self.fail_late()
        finally:
            self.slot_waits.pop(thread, None)
        if self.failure is not None:
            raise PassAborted("the pass has failed")

    # -- failure ------------------------------------------------------------------------------------------------

    @shielded
    def fail(self, error: BaseException, *, worker: int | None = None, reported: bool = False) -> None:
        """Fail the pass, and tell every worker in the context, once.

        `worker` is where the error occurred, if not here. `reported` means that `error` is the failure as another
        worker reported it.
        """
        if self.failure is not None or self.over:
            return
        agent = self.messaging.agent
        # Without the lock: this asks the error for its text, which may be code of the user's.
        failure = error if reported and isinstance(error, Exception) else as_failure(agent, error, worker)
        with self.lock:
            if self.failure is not None or self.over:
                return
            self.failure = failure
            events = [*self.gates.values(), *self.slot_waits.values()]
            self.gates.clear()
            unanswered = self.rules.abort()
            wakeup = self.wakeup
        for event in events:
            event.set()
        for effect in unanswered:
            if isinstance(effect, Acknowledge):  # the rules ask for nothing else
                self.reply(effect.ticket)
        if wakeup is not None:
            wakeup.set()
        broadcast(agent, self.context, self.info, failure)
        if not self.begun_here:
            self.drop_traceback()

    def fail_late(self) -> None:
        """Fail the pass because its deadline has passed."""
        self.fail(deadline_exceeded(self.messaging.agent, self.info, self.rules.unacknowledged))

    def drop_traceback(self) -> None:
        """Keep the failure for replies to late messages, without the frames and tensors that its traceback holds."""
        if self.failure is not None:
            self.failure = copy.copy(self.failure)

    # -- state --------------------------------------------------------------------------------------------------

    @property
    def engaged(self) -> bool:
        """Whether this worker still takes part."""
        with self.lock:
            return self.rules.engaged and self.failure is None and not self.over

    @property
    def busy(self) -> bool:
        """Whether the pass may continue here. A worker that is idle, but partly fed, still takes part."""
        with self.lock:
            return (
                (self.begun_here or self.rules.engaged or self.rules.partly_fed())
                and self.failure is None
                and not self.over
            )

    def counts(self) -> tuple[int, int]:
        """Return how many islands run, and how many gates wait in them."""
        with self.lock:
            return self.rules.running, len(self.gates)

    def __repr__(self) -> str:
        with self.lock:
            return (
                f"<pass {self.info.number:#x}: {len(self.graph.islands)} islands, {len(self.graph.fed)} sends fed, "
                f"{len(self.gates)} gates waiting, {self.rules.unacknowledged} messages unanswered>"
            )


running: ContextVar[PassRun | None] = ContextVar("telegrad_pass", default=None)
"""The pass whose island the current thread runs."""
