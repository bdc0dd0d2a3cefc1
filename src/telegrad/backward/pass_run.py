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

from telegrad import events
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
from telegrad.wire.messages import NOWHERE, PassInfo, PropagateGradientsReq

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
    message: int
    """The message that they are the gradients of."""
    driver_reads: bool
    """Whether the driver reads the reply on the channel that takes the message."""
    owned: bool = False
    """Whether nobody but telegrad holds the gradients."""


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
        self.events = messaging.agent.local.events
        self.begun_here = roots is not None
        self.began = self.touched = messaging.now()
        """When it began here, and when something happened last."""
        self.probe_began = 0.0
        self.islands_run = 0
        self.threads: dict[int, None] = {}
        """Threads that run an island now. Changed by single operations, without the lock."""
        self._recorded = False
        # Protects everything below, and the graph. Not held while torch's engine or user code runs. Walks of the graph
        # hold it, which call torch only to read nodes and leaves.
        self.lock = lock = threading.Lock()
        self.failure: Exception | None = None
        self.rules: BackwardPass[ReplyTo] = BackwardPass(messaging.me)
        hooks = messaging.accumulate_hooks
        self.graph = PassGraph(context, info, roots, hooks)
        if info.leaves == NOWHERE:
            self.graph.want_inputs()
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
        self.profile: object = None
        """What was recorded of its islands, if it is profiled; see `PassProfiler`."""

    def reply(self, reply_to: ReplyTo) -> None:
        """Reply to a message, with what is known of all workers."""
        with self.lock:
            reports, failure, count = self.rules.reports(), self.failure, self.rules.flow.count_for(reply_to[0])
        self.messaging.reply(self.info, reply_to, count, reports, failure)

    def wait_for_gradient(self, send: SendRpcBackward) -> None:
        """Wait in a gate for the gradient of a send, which is sure to come."""
        with self.lock:
            event = None
            if send.message not in self.graph.fed and self.failure is None:
                event = self.gates.setdefault(send.message, self.messaging.runtime.event())
        if event is not None:
            self._wait_in_gate(event, send)
        with self.lock:
            if self.failure is not None:
                raise PassAborted("the pass has failed")
            self.graph.fed[send.message].give_to(send)

    def _wait_in_gate(self, event: Event, send: SendRpcBackward) -> None:
        local, now, peer = self.messaging.agent.local, self.messaging.now, self.messaging.name_of(send.target)
        began = now()
        text = f"the gradient of message {send.message:#x} from worker {peer!r}, at a gate of {self.describe()}"
        key = local.waits.enter("gate", (peer,), lambda: text, about=self.info.number)
        try:
            self.messaging.wait(event, None)
        finally:
            local.waits.leave(key)
            self.note(events.GATE, began, now(), send.message, peer=peer)

    def note(self, kind: str, began: float, ended: float, number: int, *, peer: str = "", what: str = "") -> None:
        """Record an event of the pass. Gradients and islands are recorded where they are sent, taken and run."""
        self.events.record(
            kind, began, ended, number, peer=peer, what=what, context=self.context.id, pass_id=self.info.number
        )

    def describe(self) -> str:
        """Name the pass."""
        return f"backward pass {self.info.number:#x} of context {self.context.id:#x}"

    def record(self) -> None:
        """Record the pass, which has ended here."""
        if not self._recorded:
            self._recorded = True
            ended = self.messaging.now() if self.begun_here else self.touched
            ring = self.events
            if ring.on:  # as `EventRing.record` does, with one call less
                outcome = "" if self.failure is None else type(self.failure).__name__
                what, number = "began here" if self.begun_here else "", self.info.number
                n, kind, context, thread = next(ring.numbers), events.PASS, self.context.id, get_ident()
                ring.append(
                    (n, kind, self.began, ended, number, "", what, context, number, None, outcome, 0, 0, thread)
                )
            self.messaging.count("passes begun" if self.begun_here else "passes joined")

    def wait_for_slot(self, event: Event) -> None:
        """Wait in an island until a leaf's ``.grad`` may be used."""
        thread = get_ident()
        with self.lock:
            if self.failure is None:
                self.slot_waits[thread] = event
        text = f"the .grad of a leaf, which another pass or step uses, in {self.describe()}"
        key = self.messaging.agent.local.waits.enter("slot", (), lambda: text, about=self.info.number)
        try:
            if self.failure is None and not self.messaging.wait(event, self.deadline):
                self.fail_late()
        finally:
            self.messaging.agent.local.waits.leave(key)
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
        error = deadline_exceeded(self.messaging.agent, self.info, self.rules.unacknowledged)
        explainer = self.messaging.agent.client.completion.explainer
        if explainer is not None and explainer.is_worth(self.messaging.now() - self.began):
            text = explainer.explain(self.describe(), 0)
            if text:
                error.add_note(text)
        self.fail(error)

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

    def waits_for(self, worker: int) -> bool:
        """Return whether a worker has not answered a message of this pass."""
        with self.lock:
            return any(to == worker for to, _ in self.outbox.unanswered.values())

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
