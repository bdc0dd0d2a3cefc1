"""Distributed autograd of one agent: contexts, the recorder, and the passes that run in them."""

from __future__ import annotations

import itertools
import threading
from asyncio import _get_running_loop  # a C function; the public one raises where no loop runs
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch.autograd.graph import GradientEdge

from telegrad.agent.agent import Agent
from telegrad.backward import anomaly
from telegrad.backward.contexts import Contexts, DistAutogradContext
from telegrad.backward.driver import PassRun, running
from telegrad.backward.extension import AutogradExtension
from telegrad.backward.grad_swap import GradSwap
from telegrad.backward.graph import Roots
from telegrad.backward.messaging import PassMessaging
from telegrad.backward.nodes import ONE, Recv
from telegrad.backward.step_in_backward import StepsInBackward
from telegrad.backward.torch_private import gradient_edge
from telegrad.backward.watched_engine import watch_engine
from telegrad.connection.channel import Channel
from telegrad.connection.worker_record import WorkerRecord
from telegrad.errors import TelegradError, UnknownWorker, WorkerLost
from telegrad.execution.autocast import current as current_autocast
from telegrad.wire.frames import Message
from telegrad.wire.messages import (
    GRADIENT,
    INTO_CONTEXT,
    INTO_GRAD,
    NOWHERE,
    AbortPass,
    AdoptAutogradContext,
    CleanupAutogradContextReq,
    LeadsToInputReq,
    PassInfo,
    ProbeReq,
    PropagateGradientsReq,
    PropagateGradientsResp,
    ResumeReq,
)
from telegrad.wire.tensors import decode_tensors
from telegrad.wire.torch_state import autocast_is_enabled

_GONE = (
    "Autograd context no longer valid! This usually means the autograd context was cleaned up by a different thread "
    "due to an error before RecvRcpBackward had a chance to run"
)


class Autograd:
    """What `telegrad.autograd` acts on: one per agent, made before the agent starts."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        # A value of its own for each incarnation, so that a restarted worker never repeats an id.
        first = agent.me.incarnation & ((1 << 40) - 1)
        self.contexts = Contexts(agent.me.id, first, self._released, self._ask_owner)
        self.recorder = AutogradExtension(self.contexts, self._propagate)
        self.messaging = PassMessaging(agent, self.recorder.record)
        self.lending = GradSwap(agent, self.contexts, self.messaging.slots)
        self.folding = StepsInBackward(self.contexts.new_message)
        self._passes = itertools.count(first)
        watch_engine()
        self._turns = threading.Lock()  # protects the passes of every context; taken before locks of passes
        agent.recorder = self.recorder
        agent.autograd = self
        agent.handle(PropagateGradientsReq, self._on_gradient, returns=True)
        agent.handle(PropagateGradientsResp, self._on_answer, returns=True)
        agent.handle(ProbeReq, self._on_probe)
        agent.handle(LeadsToInputReq, self._on_leads)
        agent.handle(ResumeReq, self._on_resume)
        agent.handle(AbortPass, self._on_abort)
        agent.handle(CleanupAutogradContextReq, self._on_cleanup)
        agent.handle(AdoptAutogradContext, self._on_adopt)
        agent.on_lost(self._on_lost)

    # -- what users do --------------------------------------------------------------------------------------------

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
        start = _check_roots(roots, grad_tensors)
        leaves = INTO_CONTEXT if accumulate == "context" else INTO_GRAD
        if inputs is not None:
            # Each once, as torch does.
            inputs = list({id(tensor): tensor for tensor in _listed(inputs)}.values())
            start.inputs = _edges(inputs)
            if leaves == INTO_GRAD:
                for tensor in inputs:
                    if not tensor.is_leaf:
                        tensor.retain_grad()  # as torch does, reached or not
            start.tensors_in, start.into, leaves = inputs, leaves, NOWHERE
        until = self._agent.runtime.now() + timeout if timeout else None
        captured = self._run(context, start, retain_graph or create_graph, create_graph, leaves, timeout)
        for index, tensor in enumerate(inputs or ()):
            if captured[index] is not None:  # else the engine has accumulated it, or there is none
                context.gradients.add(tensor, captured, index)
                wait = partial(self.lending.wait, until=until)
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
        """The gradients of `outputs` with respect to `inputs`, which are tensors of this worker."""
        context = self.contexts.retrieve(context_id)
        start = _check_roots(outputs, grad_outputs)
        start.inputs, start.tensors_in = _edges(inputs), _listed(inputs)
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
        number = self._agent.me.id << 48 | next(self._passes) & ((1 << 48) - 1)
        check_nan = torch.is_anomaly_enabled() and anomaly.is_checking()
        steps = self.folding.steps(leaves)
        autocast = current_autocast() if autocast_is_enabled() and self._agent.carries_autocast else None
        about = PassInfo(context.id, number, retain_graph, create_graph, leaves, steps, check_nan, autocast)
        deadline = self._agent.runtime.now() + timeout if timeout else None
        run = PassRun(self.messaging, context, about, roots)
        self._take_turn(context, run)
        loop = self._agent.server.loop
        blocks = (running_loop := _get_running_loop()) is not None and loop.runs_here(running_loop)
        if blocks:
            loop.blocked_for = context.id
        try:
            return run.drive(deadline)
        finally:
            if blocks:
                loop.blocked_for = None
            if run.failure is not None:
                run.let_go()
            else:
                with context.lock:
                    context.passes.pop(number, None)
                    if about.steps:
                        context.stepped.update(step.optimizer for step in about.steps)

    def _take_turn(self, context: DistAutogradContext, run: PassRun) -> None:
        """One pass at a time in a context."""
        with self._turns:
            if context.passes and any(other.busy for other in list(context.passes.values())):
                raise TelegradError(
                    f"a backward pass of context {context.id:#x} is running on this worker already; run passes of one "
                    "context one after the other, or give each a context of its own"
                )
            if context.released:
                raise TelegradError(f"context {context.id:#x} has been left")
            context.passes = {run.about.number: run}

    def debug_info(self) -> dict[str, int]:
        """How much there is of everything, for tests and for people who wait."""
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

    # -- recv nodes ---------------------------------------------------------------------------------------------

    def _propagate(self, node: Any, grads: Sequence[torch.Tensor | None]) -> None:
        run = running.get()
        recv: Recv = node.recv
        context = recv.context() if recv.context is not None else None
        if context is None or context.released:
            raise TelegradError(_GONE)
        if run is None or run.context is not context:
            what = "a plain backward()" if run is None else f"a pass of context {run.context.id:#x}"
            raise TelegradError(
                f"{what} reached a tensor that came from worker {recv.source_name!r} in context {recv.context_id:#x}. "
                f"Its gradient can only go back there in a pass of that context: call "
                f"telegrad.autograd.backward({recv.context_id}, [loss]) inside its `with` block"
            )
        run.propagate(recv, grads)

    # -- messages -----------------------------------------------------------------------------------------------

    def _pass(self, sender: int, call: int, about: PassInfo) -> PassRun | None:
        """The pass that a message belongs to; None: it was answered, with a refusal or because it is late."""
        context = self.contexts.get(about.context)
        if context is None:
            self.messaging.count("late gradient messages")
            refusal = f"context {about.context:#x} is not known on worker {self._agent.me.name!r} (any more)"
            self._refuse(sender, call, about, refusal)
            return None
        run = context.passes.get(about.number)
        if run is not None:
            return run
        refusal = ""
        stale: list[PassRun] = []
        with self._turns:
            run = context.passes.get(about.number)
            if run is not None:
                return run
            if context.passes:
                others = list(context.passes.values())
                # A worker begins its passes of a context one after the other, with growing numbers.
                stale = [other for other in others if other.about.number >> 48 == about.number >> 48]
                if any(other.about.number > about.number for other in stale):
                    refusal = f"a pass of context {about.context:#x} that began after this one has come there"
                elif any(other.busy for other in others if other not in stale):
                    refusal = f"another pass of context {about.context:#x} is running there"
            if not refusal:
                run = PassRun(self.messaging, context, about)
                context.passes = {about.number: run}
        if run is None:
            self.messaging.count("late gradient messages")
            self._refuse(sender, call, about, refusal)
            return None
        for other in stale:
            if other.busy:  # word that it failed is under way; what it left here must not wait for that
                other.fail(TelegradError("the worker that began this pass has begun another"))
        return run

    def _refuse(self, sender: int, call: int, about: PassInfo, refusal: str) -> None:
        self._agent.oneway.tell(sender, PropagateGradientsResp(about.context, about.number, call, 0, (), refusal))

    def _on_answer(self, channel: Channel, answer: PropagateGradientsResp, message: Message) -> None:
        context = self.contexts.get(answer.context)
        run = context.passes.get(answer.number) if context is not None else None
        if run is not None:
            run.answered(channel.worker.id, answer, message.data)

    def _on_gradient(self, channel: Channel, request: PropagateGradientsReq, message: Message) -> None:
        sender = channel.worker.id
        run = self._pass(sender, request.call, request.pass_info)
        if run is None:
            return
        try:
            there: list[Any] = decode_tensors(request.attachments, message.region)
            del message  # or its memory would live as long as the island runs
            if request.autograd is not None:
                there = self.recorder.incoming(channel.worker, request.autograd, there)
            if len(there) < len(request.states):
                there = _spread(request.states, there)
            run.gradient(sender, request, there, channel if request.reply_here else None)
        except Exception as error:  # noqa: BLE001 - whoever sent it waits for an answer
            run.refuse((sender, request.call, None), error)

    def _on_probe(self, channel: Channel, request: ProbeReq, message: Message) -> None:
        sender = channel.worker.id
        run = self._pass(sender, request.call, request.pass_info)
        if run is not None:
            try:
                run.probed((sender, request.call, None), request)
            except Exception as error:  # noqa: BLE001 - as above
                run.refuse((sender, request.call, None), error)

    def _on_leads(self, channel: Channel, request: LeadsToInputReq, message: Message) -> None:
        sender = channel.worker.id
        run = self._pass(sender, request.call, request.pass_info)
        if run is not None:
            try:
                run.told((sender, request.call, None), request)
            except Exception as error:  # noqa: BLE001 - as above
                run.refuse((sender, request.call, None), error)

    def _on_resume(self, channel: Channel, request: ResumeReq, message: Message) -> None:
        sender = channel.worker.id
        run = self._pass(sender, request.call, request.pass_info)
        if run is not None:
            try:
                run.resumed((sender, request.call, None))
            except Exception as error:  # noqa: BLE001 - as above
                run.refuse((sender, request.call, None), error)

    def _on_abort(self, channel: Channel, head: AbortPass, message: Message) -> None:
        context = self.contexts.get(head.pass_info.context)
        if context is None:
            return
        with self._turns:  # or a pass that begins here at the same moment would take its place
            run = context.passes.get(head.pass_info.number)
            if run is None:
                # A tombstone: messages of the pass that are still under way are answered, and change nothing.
                run = PassRun(self.messaging, context, head.pass_info)
                context.passes[head.pass_info.number] = run
        run.fail(self.messaging.read_failure(head.failure, message.data), told=True)

    def _on_cleanup(self, channel: Channel, head: CleanupAutogradContextReq, message: Message) -> None:
        caller = channel.worker.id
        self.contexts.cleanup(head.context, caller, head.calls)
        if channel.session.state.is_over:  # the loss may have been noted before, and is not again
            context = self.contexts.get(head.context)
            if context is not None:
                self.contexts.caller_lost(context, caller)

    def _on_adopt(self, channel: Channel, head: AdoptAutogradContext, message: Message) -> None:
        if not self.contexts.adopt(head.context, channel.worker.id):
            self._agent.tell(channel.worker.id, CleanupAutogradContextReq(head.context, 0))

    # -- ends -----------------------------------------------------------------------------------------------------

    def _released(self, context: DistAutogradContext) -> None:
        with context.lock:
            context.released = True
            runs = list(context.passes.values())
            made = {**dict.fromkeys(context.heirs, 0), **context.made}
        for run in runs:
            if run.engaged:
                run.fail(TelegradError(f"context {context.id:#x} was left while a backward pass was running in it"))
        for worker, calls in made.items():
            self._agent.tell(worker, CleanupAutogradContextReq(context.id, calls))
        with context.lock:
            for send in context.sends.values():
                send.release()
            for recv in context.recvs.values():
                recv.node = None
            context.sends.clear()
            context.recvs.clear()
            context.passes.clear()
        context.gradients.clear()

    def _ask_owner(self, context: DistAutogradContext) -> None:
        """Have the owner of a context say when it has ended: one that would have told us is lost."""
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
            if record.id in context.workers():
                with context.lock:
                    runs = list(context.passes.values())
                for run in runs:
                    if run.engaged:
                        run.fail(
                            WorkerLost(
                                f"worker {record.name!r} is lost ({reason}) while a backward pass of context "
                                f"{context.id:#x} was running",
                                worker=record.name,
                                context=context.id,
                            )
                        )
        self.contexts.worker_lost(record.id)


def _spread(states: Sequence[int], there: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """The gradients that came, each at the place of its tensor."""
    rest = iter(there)
    try:
        return [next(rest) if state == GRADIENT else None for state in states]
    except (StopIteration, RuntimeError):
        return []  # fewer than announced: the check in `PassRun.gradient` names it


def _listed(tensors: Sequence[torch.Tensor] | torch.Tensor) -> list[torch.Tensor]:
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def _edges(inputs: Sequence[torch.Tensor] | torch.Tensor) -> list[GradientEdge]:
    inputs = _listed(inputs)
    if not inputs:
        raise ValueError("inputs cannot be empty")
    for number, tensor in enumerate(inputs):
        if not isinstance(tensor, torch.Tensor) or not tensor.requires_grad:
            raise TelegradError(f"One of the differentiated Tensors does not require grad: inputs[{number}]")
    return [gradient_edge(tensor) for tensor in inputs]


def _check_roots(roots: Sequence[torch.Tensor] | torch.Tensor, grads: Sequence[torch.Tensor | None] | None) -> Roots:
    """The roots with a gradient each, checked as torch does, with its words where programs may match them."""
    roots = _listed(roots)
    if not roots:
        raise TelegradError("No tensors provided for gradient computation.")
    if isinstance(grads, torch.Tensor):
        grads = [grads]
    given = list(grads) if grads is not None else [None] * len(roots)
    if len(given) != len(roots):
        raise TelegradError(f"got {len(roots)} roots and {len(given)} gradients")
    made: list[torch.Tensor | None] = []
    for number, (root, grad) in enumerate(zip(roots, given, strict=True)):
        if not isinstance(root, torch.Tensor):
            raise TypeError(f"roots[{number}] is a {type(root).__name__}, not a Tensor")
        if not root.requires_grad:
            raise TelegradError(
                f"requires_grad not set on root: roots[{number}] does not require grad and has no graph, so there is "
                "nothing to differentiate"
            )
        if grad is None:
            if root.numel() != 1:
                raise TelegradError(
                    f"roots[{number}] of shape {list(root.shape)} is not a scalar, all roots need to be scalar unless "
                    "grad_tensors are given"
                )
            if root.is_complex():
                raise TelegradError(
                    f"grad can be implicitly created only for real scalar outputs but roots[{number}] is {root.dtype}: "
                    "give grad_tensors"
                )
            # A copy costs less: sending tensors has just made some, and their code is in the caches.
            plain = type(root) is torch.Tensor and root.dtype is torch.float32 and root.is_cpu and root.dim() == 0
            grad = ONE.clone() if plain else torch.ones_like(root)
        elif grad.shape != root.shape:
            raise TelegradError(f"grad_tensors[{number}] is {list(grad.shape)}, and roots[{number}] {list(root.shape)}")
        made.append(grad)
    return Roots(roots, made)
