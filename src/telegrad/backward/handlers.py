"""Handles the messages of passes: finds the pass that each belongs to, and decodes gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from telegrad.backward import incoming
from telegrad.backward.contexts import Contexts
from telegrad.backward.failure import unpack_failure
from telegrad.backward.messaging import PassMessaging, ReplyTo
from telegrad.backward.pass_run import PassRun
from telegrad.backward.passes import Passes
from telegrad.connection.channel import Channel
from telegrad.errors import LimitExceeded
from telegrad.wire.frames import Message
from telegrad.wire.messages import (
    GRADIENT,
    AbortPass,
    LeadsToInputReq,
    ProbeReq,
    PropagateGradientsReq,
    PropagateGradientsResp,
    ResumeReq,
)


class PassHandlers:
    """The handlers of one agent. They run on the thread that read the message."""

    def __init__(self, contexts: Contexts, passes: Passes, messaging: PassMessaging) -> None:
        self._contexts = contexts
        self._passes = passes
        self._messaging = messaging
        agent = messaging.agent
        self._pipeline = agent.pipeline
        agent.handle(PropagateGradientsReq, self.on_gradient, returns=True)
        agent.handle(PropagateGradientsResp, self.on_reply, returns=True)
        agent.handle(ProbeReq, self.on_probe)
        agent.handle(LeadsToInputReq, self.on_leads)
        agent.handle(ResumeReq, self.on_resume)
        agent.handle(AbortPass, self.on_abort)
        for kind in (PropagateGradientsReq, ProbeReq, LeadsToInputReq, ResumeReq):
            agent.admission.refusals[kind] = self.refuse

    def on_gradient(self, channel: Channel, request: PropagateGradientsReq, message: Message) -> None:
        """Decode gradients, and give them to their pass."""
        sender = channel.worker.id
        run = self._passes.find(sender, request.call, request.pass_info)
        if run is None:
            return
        try:
            grads = self._pipeline.tensors(channel.worker, request, message)
            size = message.total
            del message  # or its memory would live as long as the island runs
            if len(grads) < len(request.states):
                grads = _at_their_tensors(request.states, grads)
            back = channel if request.reply_here else None
            incoming.gradient(run, sender, request, grads, back, channel.peer, size)
        except Exception as error:  # noqa: BLE001 - the sender waits for a reply
            incoming.refuse(run, (sender, request.call, None), error)

    def on_reply(self, channel: Channel, reply: PropagateGradientsResp, message: Message) -> None:
        """Give a reply to its pass, if that is still there."""
        context = self._contexts.get(reply.context)
        run = context.passes.get(reply.number) if context is not None else None
        if run is not None:
            incoming.replied(run, channel.worker.id, reply, message.data)

    def on_probe(self, channel: Channel, request: ProbeReq, message: Message) -> None:
        """Continue the probe."""
        self._take(channel, request, lambda run, reply_to: incoming.probed(run, reply_to, request))

    def on_leads(self, channel: Channel, request: LeadsToInputReq, message: Message) -> None:
        """Note what leads to inputs of the pass."""
        self._take(channel, request, lambda run, reply_to: incoming.leads_to_inputs(run, reply_to, request))

    def on_resume(self, channel: Channel, request: ResumeReq, message: Message) -> None:
        """Continue a pass after its probe."""
        self._take(channel, request, incoming.resumed)

    def _take(
        self,
        channel: Channel,
        request: ProbeReq | LeadsToInputReq | ResumeReq,
        take: Callable[[PassRun, ReplyTo], None],
    ) -> None:
        reply_to = channel.worker.id, request.call, None
        run = self._passes.find(channel.worker.id, request.call, request.pass_info)
        if run is not None:
            try:
                take(run, reply_to)
            except Exception as error:  # noqa: BLE001 - as above
                incoming.refuse(run, reply_to, error)

    def refuse(
        self,
        channel: Channel,
        request: PropagateGradientsReq | ProbeReq | LeadsToInputReq | ResumeReq,
        error: LimitExceeded,
    ) -> None:
        """Fail the pass of a message that exceeds a limit of its sender."""
        sender = channel.worker.id
        run = self._passes.find(sender, request.call, request.pass_info)
        if run is not None:
            incoming.refuse(run, (sender, request.call, None), error)

    def on_abort(self, channel: Channel, head: AbortPass, message: Message) -> None:
        """Fail a pass that has failed elsewhere."""
        context = self._contexts.get(head.pass_info.context)
        if context is not None:
            run = self._passes.find_for_abort(context, head.pass_info)
            run.fail(unpack_failure(self._messaging.agent, head.failure, message.data), reported=True)


def _at_their_tensors(states: Sequence[int], grads: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """Return the gradients that came, each at the index of its tensor."""
    rest = iter(grads)
    try:
        return [next(rest) if state == GRADIENT else None for state in states]
    except (StopIteration, RuntimeError):
        return []  # fewer than announced: `SendRpcBackward.check` reports it
