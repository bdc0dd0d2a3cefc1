"""Sends the messages of a pass: gradients of received tensors, the probe, and word that the probe is over."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from threading import get_ident
from typing import Any

import torch

from telegrad import events
from telegrad.backward.failure import PassAborted
from telegrad.backward.messaging import ReplyTo
from telegrad.backward.nodes import HELD_BY_ENGINE, Recv
from telegrad.backward.pass_run import GradientMessage, OnReply, PassRun, running
from telegrad.errors import TelegradError, WorkerLost
from telegrad.protocol.backward import IdleReport, PassEffect
from telegrad.torch_private import compiled_autograd_is_on
from telegrad.torch_private_ownership import nobody_else_holds_any
from telegrad.wire.in_place import SMALLEST, may_stay_in_place
from telegrad.wire.messages import (
    GRADIENT,
    NONE,
    UNREACHED,
    LeadsToInputReq,
    PiggybackedResp,
    ProbeReq,
    PropagateGradientsReq,
    PropagateGradientsResp,
    ResumeReq,
)

_MANY_ELEMENTS = SMALLEST // 8
"""Gradients with fewer elements are always copied. Unlike bytes, all kinds of tensors know the number."""

_GONE = (
    "Autograd context no longer valid! This usually means the autograd context was cleaned up by a different thread "
    "due to an error before RecvRcpBackward had a chance to run"
)


def propagate(node: Any, grads: Sequence[torch.Tensor | None]) -> None:
    """Send the gradients of a recv node, which the engine executes now, to the worker that it received from."""
    run = running.get()
    recv: Recv = node.recv
    context = recv.context() if recv.context is not None else None
    if run is None or context is None or context.released or run.context is not context:
        raise _not_in_its_pass(run, recv, gone=context is None or context.released)
    reached = run.graph.reached.pop(recv.message, None)
    if reached is None:
        # It would be the second gradient for one message, or one that the pass does not expect: it would be lost.
        raise TelegradError(
            f"a backward() inside this backward pass reached a tensor that came from worker {recv.source_name!r} "
            f"in context {recv.context_id:#x}. Only the pass itself can send its gradient back: detach the tensor "
            "before the inner backward, or make the inner one part of the loss"
        )
    if not reached:
        return  # it is an input, and nothing behind it is needed
    sender = run.messaging.agent.peers.table.by_id.get(recv.source)  # the short way, without calls, to `lost_sender`
    if sender is None or sender.record.incarnation != recv.incarnation:
        lost = lost_sender(run, recv)
        if lost is not None:
            raise lost
    present: list[torch.Tensor] = []
    on_cpu, large = True, False
    for grad in grads:
        if grad is not None:
            present.append(grad)  # a comprehension would be one call more
            on_cpu = on_cpu and grad.is_cpu
            large = large or grad.numel() >= _MANY_ELEMENTS
    count = len(grads)
    states, is_whole = (GRADIENT,) * count, len(present) == count
    if not is_whole:
        states = tuple(
            [
                GRADIENT if grad is not None else NONE if index in reached else UNREACHED
                for index, grad in enumerate(grads)
            ]
        )
    devices = recv.devices
    if devices and not is_whole:
        devices = [device for device, grad in zip(devices, grads, strict=True) if grad is not None]
    metadata = None
    if run.info.create_graph:
        metadata = run.messaging.record_gradients(run.context, recv.source, present)
    on_driver = get_ident() == run.driver_thread
    outbox = run.outbox
    with run.lock:
        if run.failure is not None:
            raise PassAborted("the pass has failed")
        number = 0
        if run.rules.flow.sent(recv.source):
            number = next(outbox.numbers)
            outbox.unanswered[number] = recv.source, run.rules.acknowledged
        known = run.rules.liveness_known
        # After the probe there may be gates, which need what comes while the driver runs an island and reads nothing.
        back = None if known else outbox.back.get(recv.source)
        driver_reads = on_driver and not known and back is None and outbox.read_from in (None, recv.source)
        if driver_reads:
            outbox.read_from = recv.source
    head = partial(
        PropagateGradientsReq, number, run.info, recv.message, states, known, autograd=metadata, reply_here=driver_reads
    )
    message = GradientMessage(recv.source, head, present, devices, back, recv.message, driver_reads)
    if large and metadata is None:
        del present, grad
        message.owned = _are_unheld(message.grads)
    # On a device the gradients are ready on the stream of this node, which is the current one only in here. Hooks that
    # are called after the node may change them.
    if not number and on_cpu and not recv.hooked and recv.message in outbox.held:
        outbox.held[recv.message] = message  # sent when the island has ended
    elif not send_gradients(run, message):
        raise PassAborted("the pass has failed")


def lost_sender(run: PassRun, recv: Recv) -> WorkerLost | None:
    """Return the error of a pass that needs what a worker had recorded that was replaced since; None if it was not."""
    if run.messaging.agent.peers.find(recv.source).record.incarnation == recv.incarnation:
        return None
    return WorkerLost(
        f"worker {recv.source_name!r} was lost and replaced since it sent a tensor that a backward pass of context "
        f"{recv.context_id:#x} has reached: leave the context, and run the step again",
        worker=recv.source_name,
        context=recv.context_id,
    )


def _are_unheld(grads: Sequence[torch.Tensor]) -> bool:
    """Whether nobody but the engine, which executes their recv node, and a list with these gradients holds them."""
    if not may_stay_in_place(grads) or compiled_autograd_is_on():
        return False
    return nobody_else_holds_any(grads, HELD_BY_ENGINE + 1)


def _not_in_its_pass(run: PassRun | None, recv: Recv, *, gone: bool) -> TelegradError:
    """Return the error of a recv that a backward reached that is no pass of its context."""
    if gone:
        return TelegradError(_GONE)
    what = "a plain backward()" if run is None else f"a pass of context {run.context.id:#x}"
    return TelegradError(
        f"{what} reached a tensor that came from worker {recv.source_name!r} in context {recv.context_id:#x}. "
        f"Its gradient can only go back there in a pass of that context: call "
        f"telegrad.autograd.backward({recv.context_id}, [loss]) inside its `with` block"
    )


def send_held(run: PassRun) -> None:
    """Send gradients that wait for the end of their island: the engine is about to call user code."""
    held = run.outbox.held
    for key, message in list(held.items()):
        if message is not None and held.pop(key, None) is not None and not send_gradients(run, message):
            raise PassAborted("the pass has failed")


def send_gradients(run: PassRun, message: GradientMessage, reply: PiggybackedResp | None = None) -> bool:
    """Send gradients, and a reply with them. Returns False if that failed, which fails the pass."""
    head = message.head if reply is None else partial(message.head, response=reply)
    messaging = run.messaging
    began = messaging.now()
    try:
        channel, size = messaging.agent.oneway.send_gradients(
            message.to, head, message.grads, message.devices, back=message.back, owned=message.owned
        )
    except Exception as error:  # noqa: BLE001 - the caller of backward gets it, whatever it is
        run.fail(error)
        return False
    if message.driver_reads:
        run.outbox.driver_channel = channel
    ended = run.touched = messaging.now()
    ring = run.events
    if ring.on:  # as `EventRing.record` does
        n, kind, thread, append = next(ring.numbers), events.GRADIENT_SENT, get_ident(), ring.append
        about, peer, context, number = message.message, channel.peer, run.context.id, run.info.number
        append((n, kind, began, ended, about, peer, "", context, number, None, "", size, 0, thread))
    return True


def send(run: PassRun, worker: int, head: ProbeReq | LeadsToInputReq | ResumeReq) -> None:
    """Send a message without gradients. An error fails the pass."""
    try:
        run.messaging.agent.oneway.send(worker, head)
    except TelegradError as error:
        run.fail(error)


def expect_reply(run: PassRun, worker: int, on_reply: OnReply) -> int:
    """Return a number for a message to a worker; `on_reply` is called with the reply to it."""
    with run.lock:
        number = next(run.outbox.numbers)
        run.outbox.unanswered[number] = worker, on_reply
    return number


def settle(run: PassRun, sender: int, reply: PropagateGradientsResp | PiggybackedResp) -> list[PassEffect[ReplyTo]]:
    """Pass a reply to the rules. Called with the lock held."""
    expected = run.outbox.unanswered.get(reply.call)
    if expected is None or expected[0] != sender:  # a second reply, or one of a worker that was not asked
        return []
    del run.outbox.unanswered[reply.call]
    reports = {}
    for report in reply.reports:
        reports[report.worker] = IdleReport(report.number, report.partly_fed)
    return expected[1](reports, sender, reply.count)
