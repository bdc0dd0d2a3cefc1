"""Describes what the threads and the deferred calls of a worker wait for."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from telegrad.agent.agent import Agent
from telegrad.calls.call import Served
from telegrad.calls.collective_messages import SHUTDOWN, Respond
from telegrad.calls.observing import OBSERVE
from telegrad.calls.service_names import COLLECTIVE
from telegrad.connection.peer_table import Peer
from telegrad.errors import NotInitialized
from telegrad.observe.model import CallKey, Wait
from telegrad.observe.stacks import Stacks
from telegrad.rref.handle import RRef
from telegrad.rref.ids import describe as describe_rref
from telegrad.waiting_report import workers as named

Running = dict[int, list[Served]]
"""The calls that threads run now, outermost first, by thread."""


def key_of(served: Any) -> CallKey | None:
    """Return what identifies a served call in the group."""
    return (served.caller, served.id) if isinstance(served, Served) else None


def waits_of(
    agent: Agent, peers: Iterable[Peer], served: list[Served], running: Running, stacks: Stacks
) -> tuple[Wait, ...]:
    """Return all waits of a worker."""
    creators = {call.creates: call for call in served if call.creates is not None}
    return (
        *_replies(agent, peers, running, stacks),
        *_blocked(agent, creators, running, stacks),
        *_deferred(served, creators),
        *_collectives(agent),
        *_passes(agent, running, stacks),
    )


def _innermost(running: Running, thread: int) -> CallKey | None:
    calls = running.get(thread)
    return key_of(calls[-1]) if calls else None


def _replies(agent: Agent, peers: Iterable[Peer], running: Running, stacks: Stacks) -> Iterable[Wait]:
    me = agent.me.name
    for peer in peers:
        channel = peer.outgoing
        for call in list(channel.calls.values()) if channel is not None else ():
            if call.function == OBSERVE:
                continue
            for waiter in list(call.waiters):
                for_call = _innermost(running, waiter.thread) or key_of(call.parent)
                text, thread = f"the reply to {call}", stacks.native_id(waiter.thread)
                yield Wait("reply", (call.worker,), call.started, text, thread, (me, call.id), for_call)
            # A coroutine that has made a call and does something else does not wait for it.
            if not call.waiters and call.parent is not None and call.awaited:
                text = f"the reply to {call}"
                yield Wait("reply", (call.worker,), call.started, text, 0, (me, call.id), key_of(call.parent))


def _blocked(agent: Agent, creators: dict[Any, Served], running: Running, stacks: Stacks) -> Iterable[Wait]:
    for wait in agent.local.waits.all():
        for_call = key_of(wait.served) or _innermost(running, wait.thread)
        call = key_of(creators.get(wait.about)) if wait.kind == "value" else None
        thread = stacks.native_id(wait.thread)
        yield Wait(wait.kind, tuple(wait.workers), wait.since, wait.text(), thread, call, for_call)


def _deferred(served: Iterable[Served], creators: dict[Any, Served]) -> Iterable[Wait]:
    for waiting in served:
        wait = waiting.waits
        if wait is None:
            continue
        call: CallKey | None = None
        workers: tuple[str, ...] = ()
        if wait.kind == "queue":
            current = getattr(wait.about, "running_call", None)
            call = key_of(current)
            text = "its turn at an ordered object"
            if isinstance(current, Served):
                text += f", which runs {current.function} (call {current.id} of worker {current.caller!r})"
            else:
                text += ": an earlier call of its caller has not arrived"
                workers = (waiting.caller,)
        elif wait.kind == "value":
            call = key_of(creators.get(wait.about))
            text = "a value" if wait.about is None else f"the value of {describe_rref(wait.about)}"
            if call is None:
                text += ", whose call has not arrived"
        else:
            text = "the owners of the references in its arguments to confirm them"
            owners = {each.owner_name() for _, each in list(wait.about) if isinstance(each, RRef)}
            workers = tuple(sorted(owners))
        yield Wait(wait.kind, workers, wait.since, text, 0, call, key_of(waiting))


def _collectives(agent: Agent) -> Iterable[Wait]:
    for key, began, missing, answers in agent.collectives.pending():
        if not missing:
            continue
        kind, what = ("shutdown", "shutdown()") if key.topic == SHUTDOWN else ("barrier", COLLECTIVE)
        text = f"{named(missing)} to join {what} (number {key.number})"
        for answer in answers:
            for_call = key_of(_served_of(answer))
            yield Wait(kind, tuple(missing), began, text, 0, None, for_call)


def _served_of(answer: Respond) -> Any:
    """Return the call that a function answers."""
    arguments = getattr(answer, "args", ())
    return arguments[0] if arguments else None


def _passes(agent: Agent, running: Running, stacks: Stacks) -> Iterable[Wait]:
    try:
        contexts = agent.autograd.contexts.all()
    except NotInitialized:  # a bare agent, as tests have
        return
    for context in contexts:
        for run in list(context.passes.values()):
            with run.lock:
                owed = sorted({agent.autograd.messaging.name_of(to) for to, _ in run.outbox.unanswered.values()})
                waits = run.begun_here and not run.over and run.failure is None and not run.rules.running
            if owed and waits:
                text = f"{named(owed)} to finish in {run.describe()}"
                for_call, thread = _innermost(running, run.driver_thread), stacks.native_id(run.driver_thread)
                yield Wait("pass", tuple(owed), run.touched, text, thread, None, for_call)
