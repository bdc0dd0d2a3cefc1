"""Distributed autograd of one agent: backward(), grad(), and the life of contexts."""

from __future__ import annotations

import itertools
from asyncio import _get_running_loop  # a C function; the public one raises where no loop runs
from collections.abc import Sequence
from functools import partial

import torch

from telegrad import events
from telegrad.agent.agent import Agent
from telegrad.backward import anomaly
from telegrad.backward.contexts import Contexts, DistAutogradContext
from telegrad.backward.driver import drive
from telegrad.backward.extension import AutogradExtension
from telegrad.backward.grad_swap import GradSwap
from telegrad.backward.graph import Roots
from telegrad.backward.handlers import PassHandlers
from telegrad.backward.messaging import PassMessaging
from telegrad.backward.outgoing import propagate
from telegrad.backward.pass_run import PassRun
from telegrad.backward.passes import Passes
from telegrad.backward.roots import as_list, check_roots, edges_of
from telegrad.backward.step_in_backward import StepsInBackward
from telegrad.backward.watched_engine import watch_engine
from telegrad.calls.extension import Concern
from telegrad.connection.channel import Channel
from telegrad.connection.worker_record import WorkerRecord
from telegrad.errors import LimitExceeded, TelegradError, UnknownWorker, WorkerLost
from telegrad.execution.autocast import current_autocast
from telegrad.torch_private import autocast_is_enabled
from telegrad.wire.frames import Message
from telegrad.wire.messages import (
    INTO_CONTEXT,
    INTO_GRAD,
    NOWHERE,
    AdoptAutogradContext,
    CleanupAutogradContextReq,
    PassInfo,
)


class Autograd:
    """What `telegrad.autograd` acts on: one per agent, made before the agent starts."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        # Differs between incarnations, so a restarted worker never repeats an id.
        first = agent.me.incarnation & ((1 << 40) - 1)
        random_id = agent.runtime.random_bits if agent.registry is not None else None
        now = agent.runtime.now
        self.contexts = Contexts(agent.me.id, first, self._released, self._ask_owner, random_id, now)
        agent.pipeline.add(AutogradExtension(self.contexts, propagate), Concern.CONTEXT)
        self.messaging = PassMessaging(agent)
        self.grad_swap = GradSwap(agent, self.contexts, self.messaging.slots)
        self.step_in_backward = StepsInBackward(self.contexts.new_message)
        self.passes = Passes(self.contexts, self.messaging)
        self.handlers = PassHandlers(self.contexts, self.passes, self.messaging)
        self._numbers = itertools.count(first)
        watch_engine()
        agent.autograd = self
        agent.handle(CleanupAutogradContextReq, self._on_cleanup)
        agent.handle(AdoptAutogradContext, self._on_adopt)
        agent.on_lost(self._on_lost, lambda: not self.contexts.all())

    def backward(
        self,
        context_id: int,
        roots: Sequence[torch.Tensor] | torch.Tensor,
        retain_graph: bool = False,
        *,
        grad_tensors: Sequence[torch.Tensor | None] | None = None,
        inputs: Sequence[torch.Tensor] | None = None,
        create_graph: bool = False,
        accumulate: str = "context",
        timeout: float | None = None,
    ) -> None:
        """Run one pass from `roots`, through every worker that took part in the context."""
        context = self.contexts.retrieve(context_id)
        if accumulate not in ("context", "grad"):
            raise ValueError(f"accumulate is 'context' or 'grad', not {accumulate!r}")
        start = check_roots(roots, grad_tensors)
        leaves = INTO_CONTEXT if accumulate == "context" else INTO_GRAD
        if inputs is not None:
            # Each once, as torch does.
            inputs = list({id(tensor): tensor for tensor in as_list(inputs)}.values())
            start.inputs = edges_of(inputs)
            if leaves == INTO_GRAD:
                for tensor in inputs:
                    if not tensor.is_leaf:
                        tensor.retain_grad()  # as torch does, reached or not
            start.input_tensors, start.into, leaves = inputs, leaves, NOWHERE
        until = self._agent.runtime.now() + timeout if timeout else None
        captured = self._run(context, start, retain_graph or create_graph, create_graph, leaves, timeout)
        for index, tensor in enumerate(inputs or ()):
            if captured[index] is not None:  # else the engine has accumulated it, or there is none
                context.gradients.add(tensor, captured, index)
                wait = partial(self.grad_swap.wait, until=until)
                self.messaging.accumulate_through.run_hooks(context.gradients, tensor, wait)

    def grad(
        self,
        context_id: int,
        outputs: Sequence[torch.Tensor] | torch.Tensor,
        inputs: Sequence[torch.Tensor] | torch.Tensor,
        grad_outputs: Sequence[torch.Tensor | None] | None = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        allow_unused: bool = False,
        timeout: float | None = None,
    ) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of `outputs` with respect to `inputs`, which are tensors of this worker."""
        context = self.contexts.retrieve(context_id)
        start = check_roots(outputs, grad_outputs)
        start.inputs, start.input_tensors = edges_of(inputs), as_list(inputs)
        retain = create_graph if retain_graph is None else retain_graph
        captured = self._run(context, start, retain, create_graph, NOWHERE, timeout)
        if not allow_unused and any(grad is None for grad in captured):
            raise TelegradError(
                "One of the differentiated Tensors appears to not have been used in the graph. Set allow_unused=True "
                "if this is the desired behavior."
            )
        return tuple(captured)

    def _run(
        self,
        context: DistAutogradContext,
        roots: Roots,
        retain_graph: bool,
        create_graph: bool,
        leaves: int,
        timeout: float | None,
    ) -> list[torch.Tensor | None]:
        number = self._agent.me.id << 48 | next(self._numbers) & ((1 << 48) - 1)
        modes = anomaly.current_modes() if torch.is_anomaly_enabled() else 0
        profiling = self.messaging.profiling
        if profiling is not None:
            modes |= profiling.modes()
        steps = self.step_in_backward.steps(leaves) if self.step_in_backward.added else ()
        autocast = current_autocast() if autocast_is_enabled() and self._agent.client.carries_autocast else None
        info = PassInfo(context.id, number, retain_graph, create_graph, leaves, steps, modes, autocast)
        deadline = self._agent.runtime.now() + timeout if timeout else None
        run = PassRun(self.messaging, context, info, roots)
        self.passes.begin(context, run)
        loop = self._agent.server.loop
        blocks = (running_loop := _get_running_loop()) is not None and loop.runs_here(running_loop)
        if blocks:
            loop.blocked_for = context.id
        try:
            captured = drive(run, deadline)
            if profiling is not None:
                profiling.collect(run)
            return captured
        finally:
            run.record()
            if blocks:
                loop.blocked_for = None
            if run.failure is not None:
                run.drop_traceback()
            else:
                with context.lock:
                    context.passes.pop(number, None)
                    if info.steps:
                        context.stepped.update(step.optimizer for step in info.steps)

    def debug_info(self) -> dict[str, int]:
        """Return how many contexts, passes, islands, gates, sends and recvs there are, and counters of passes."""
        contexts = self.contexts.all()
        passes = [run for context in contexts for run in list(context.passes.values())]
        return {
            "num_autograd_contexts": len(contexts),
            "num_current_backward_passes": sum(run.engaged for run in passes),
            "islands_running": sum(run.counts()[0] for run in passes),
            "gates_waiting": sum(run.counts()[1] for run in passes),
            "sends": sum(len(context.sends) for context in contexts),
            "recvs": sum(len(context.recvs) for context in contexts),
            **self.messaging.counts(),
        }

    # -- the end of contexts ------------------------------------------------------------------------------------

    def _on_cleanup(self, channel: Channel, head: CleanupAutogradContextReq, message: Message) -> None:
        caller, account = channel.worker.id, channel.account
        try:
            self.contexts.cleanup(head.context, caller, head.calls, None if account is None else account.check_count)
        except LimitExceeded:
            return  # nothing of the context exists here, and nothing is made for its end
        if channel.session.state.is_over:  # the loss may have been noted before, and is not noted again
            context = self.contexts.get(head.context)
            if context is not None:
                self.contexts.caller_lost(context, caller)

    def _on_adopt(self, channel: Channel, head: AdoptAutogradContext, message: Message) -> None:
        if not self.contexts.adopt(head.context, channel.worker.id):
            self._agent.tell(channel.worker.id, CleanupAutogradContextReq(head.context, 0))

    def _released(self, context: DistAutogradContext) -> None:
        with context.lock:
            context.released = True
            runs = list(context.passes.values())
            made = {**dict.fromkeys(context.adopted, 0), **context.made}
        for run in runs:
            if run.engaged:
                run.fail(TelegradError(f"context {context.id:#x} was left while a backward pass was running in it"))
            if not run.begun_here:
                run.record()
        for worker, calls in made.items():
            self._agent.tell(worker, CleanupAutogradContextReq(context.id, calls))
        # Tensors are freed without the lock, since finalizers of the user may run then.
        with context.lock:
            sends, recvs, passes = context.sends, context.recvs, context.passes
            context.sends, context.recvs, context.passes = {}, {}, {}
        for send in sends.values():
            send.release()
        for recv in recvs.values():
            recv.node = None
        del runs, passes
        context.gradients.clear()
        local = self._agent.local
        local.events.record(events.CONTEXT, context.began, local.runtime.now(), context.id, context=context.id)

    def _ask_owner(self, context: DistAutogradContext) -> None:
        """Ask the owner of a context to say when it ends, since the worker that would have said so is lost."""
        try:
            gone = self._agent.peers.find(context.owner).gone
        except UnknownWorker:
            gone = "it has left"
        if gone:
            self.contexts.release(context)
        else:
            self._agent.tell(context.owner, AdoptAutogradContext(context.id))

    def _on_lost(self, record: WorkerRecord, reason: str) -> None:
        if self._agent.closed:
            self.messaging.slots.close()
        for context in self.contexts.all():
            takes_part = record.id in context.workers()
            with context.lock:
                runs = list(context.passes.values())
            for run in runs:
                # After a probe, the caller of backward sends messages to workers with which it has exchanged no calls.
                if run.engaged and (takes_part or run.waits_for(record.id)):
                    run.fail(
                        WorkerLost(
                            f"worker {record.name!r} is lost ({reason}) while a backward pass of context "
                            f"{context.id:#x} was running",
                            worker=record.name,
                            context=context.id,
                        )
                    )
        self.contexts.worker_lost(record.id)
