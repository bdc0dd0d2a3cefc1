"""Takes the messages of a pass that other workers sent: gradients, the probe, replies."""

from __future__ import annotations

from collections.abc import Sequence
from threading import get_ident

import torch

from telegrad import events
from telegrad.backward.effects import carry_out
from telegrad.backward.failure import unpack_failure
from telegrad.backward.graph import Fed
from telegrad.backward.inputs import Found
from telegrad.backward.messaging import ReplyTo
from telegrad.backward.outgoing import settle
from telegrad.backward.pass_run import PassRun
from telegrad.backward.probe import learn, walk
from telegrad.calls.link_reader import Waiter
from telegrad.connection.channel import Channel
from telegrad.errors import TelegradError
from telegrad.protocol.backward import StartIsland
from telegrad.wire.messages import UNREACHED, LeadsToInputReq, ProbeReq, PropagateGradientsReq, PropagateGradientsResp


def gradient(
    run: PassRun,
    sender: int,
    request: PropagateGradientsReq,
    grads: list[torch.Tensor | None],
    back: Channel | None,
    name: str = "",
    size: int = 0,
) -> None:
    """Take the gradients of one of our sends, in a message of `size` bytes from the worker of this name.

    `back` is the channel on which the sender reads replies, if it does.
    """
    reply_to = (sender, request.call, back) if request.call else None
    context, messaging = run.context, run.messaging
    with context.lock:
        send = context.sends.get(request.message)
    try:
        if send is None:
            them, me = messaging.name_of(sender), messaging.name_of(messaging.me)
            raise TelegradError(
                f"worker {them!r} sent gradients for message {request.message:#x}, which worker {me!r} never "
                f"sent in context {context.id:#x}"
            )
        send.check(grads, sender, messaging.me, messaging.name_of)
    except TelegradError as error:
        run.fail(error)
        late(run, reply_to, sender)
        return
    message, states, ring = request.message, request.states, run.events
    now = run.touched = messaging.now()
    reached: Sequence[int] = range(len(states))
    if UNREACHED in states:
        reached = [index for index in reached if states[index] != UNREACHED]
    wakeup: Waiter | None = None
    with run.lock:
        rules, graph = run.rules, run.graph
        if graph.needs is not None:
            needed = graph.needs.tensors.get(message, ())
            reached = [index for index in reached if index in needed]
        if run.failure is not None or message in graph.fed:
            messaging.count("late gradient messages")
            effects = rules.late_message(reply_to, sender)
        else:
            graph.fed[message] = Fed(grads, reached)
            if back is not None:
                run.outbox.back[sender] = back
            effects = []
            if request.probe_done and not rules.liveness_known:
                effects = learn(run)
            elif not rules.planned:
                rules.plan(graph.plan(set()))
            if message not in rules.island_of:
                rules.add_island(graph.grow(message), [message])
            effects += rules.gradient(reply_to, message, sender)
            if request.response is not None:
                effects += settle(run, sender, request.response)
        gate = run.gates.pop(message, None) if run.gates else None
        if len(effects) == 1 and run.begun_here and type(effect := effects[0]) is StartIsland and not effect.waiting:
            # As `carry_out` does with what it leaves to the driver, which is often this thread.
            run.todo.append(effect)
            effects, wakeup = [], run.wakeup
    if gate is not None:
        gate.set()
    if effects:
        carry_out(run, effects)
    elif wakeup is not None:
        if get_ident() == run.driver_thread:
            wakeup.finished = True  # it looks there when it is done here
        else:
            wakeup.set()
    # As `EventRing.record` does. At the end: whoever waits for what this gradient leads to does not wait for it.
    if ring.on:
        n, kind, thread, append = next(ring.numbers), events.GRADIENT_ARRIVED, get_ident(), ring.append
        append((n, kind, now, now, message, name, "", context.id, run.info.number, None, "", 0, size, thread))


def refuse(run: PassRun, reply_to: ReplyTo, error: Exception) -> None:
    """Fail the pass because a message could not be taken. A second reply to one message is dropped by its receiver."""
    run.fail(error)
    if reply_to[1]:
        run.reply(reply_to)


def late(run: PassRun, reply_to: ReplyTo | None, sender: int) -> None:
    """Take a message that changes nothing."""
    with run.lock:
        effects = run.rules.late_message(reply_to, sender)
    carry_out(run, effects)


def probed(run: PassRun, reply_to: ReplyTo, request: ProbeReq) -> None:
    """Continue the probe from tensors of one of our sends."""
    with run.context.lock:
        send = run.context.sends.get(request.message)
    if send is None:  # this worker may have been replaced since, and must not look as if nothing was behind them
        them, me = run.messaging.name_of(reply_to[0]), run.messaging.name_of(run.messaging.me)
        text = f"worker {them!r} asked for tensors of message {request.message:#x}, which worker {me!r} never sent"
        refuse(run, reply_to, TelegradError(f"{text} in context {run.context.id:#x}"))
        return
    with run.lock:
        effects = run.rules.probe_received(reply_to)
    carry_out(run, effects)
    # Only the worker that received the tensors can tell that they were used.
    is_known = send.target == reply_to[0]
    walk(run, lambda: run.graph.mark_live(send, request.tensors) if is_known else Found())


def leads_to_inputs(run: PassRun, reply_to: ReplyTo, request: LeadsToInputReq) -> None:
    """Note that tensors of a received message lead to an input of the pass, as their sender says."""
    with run.lock:
        effects = run.rules.probe_received(reply_to)
    carry_out(run, effects)
    needs = run.graph.needs
    with run.context.lock:
        recv = run.context.recvs.get(request.message)
    if recv is not None and recv.source != reply_to[0]:
        needs = None  # as above
    walk(run, lambda: needs.mark_leading(request.message, request.tensors) if needs is not None else Found())


def resumed(run: PassRun, reply_to: ReplyTo) -> None:
    """Continue after the probe."""
    with run.lock:
        effects = [] if run.rules.liveness_known else learn(run)
        effects += run.rules.resume_received(reply_to)
    carry_out(run, effects)


def replied(run: PassRun, sender: int, reply: PropagateGradientsResp, data: memoryview) -> None:
    """Take the reply to a message that this worker sent."""
    if reply.failure is not None:
        run.fail(unpack_failure(run.messaging.agent, reply.failure, data), reported=True)
    elif reply.refusal:
        name = run.messaging.name_of(sender)
        run.fail(TelegradError(f"worker {name!r} refused to take part in the pass: {reply.refusal}"))
    with run.lock:
        effects = settle(run, sender, reply)
    carry_out(run, effects)
