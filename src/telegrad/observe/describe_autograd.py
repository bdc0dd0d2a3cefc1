"""Describes the contexts of a worker, their edges and nodes, and the passes that run in them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from telegrad.agent.agent import Agent
from telegrad.backward.contexts import DistAutogradContext
from telegrad.backward.pass_run import PassRun
from telegrad.observe.context_nodes import nodes_of, type_and_shape
from telegrad.observe.model import ContextView, Edge, PassView, ViewRequest
from telegrad.observe.stacks import Stacks

_MOST_CONTEXTS = 500
_MOST_EDGES = 1000
_MOST_SHAPES = 8


def pass_views(agent: Agent, stacks: Stacks) -> tuple[PassView, ...]:
    """Return the passes that run on a worker."""
    return tuple(
        _pass_view(agent, context, run, stacks)
        for context in agent.autograd.contexts.all()
        for run in list(context.passes.values())
        if run.busy
    )


def _pass_view(agent: Agent, context: DistAutogradContext, run: PassRun, stacks: Stacks) -> PassView:
    name_of = agent.autograd.messaging.name_of
    with run.lock:
        owed = sorted({name_of(to) for to, _ in run.outbox.unanswered.values()})
        islands, running = len(run.graph.islands), run.rules.running
        partly, gates = run.rules.partly_fed(), list(run.gates)
    targets = {message: name_of(send.target) for message, send in list(context.sends.items()) if message in gates}
    texts = [f"the gradient of message {each:#x} from worker {targets.get(each, '?')!r}" for each in gates]
    state = "waits in gates" if gates else "runs islands" if running else "waits for replies" if owed else ""
    if not state:
        state = "waits for gradients of the rest of an island" if partly else "idle"
    return PassView(
        run.info.number,
        context.id,
        run.began,
        name_of(run.info.number >> 48),
        tuple(owed),
        run.islands_run,
        max(0, islands - run.islands_run),
        tuple(texts),
        state,
        tuple(stacks.native_id(thread) for thread in [*run.threads, run.driver_thread] if thread),
    )


def context_views(agent: Agent, request: ViewRequest) -> tuple[ContextView, ...]:
    """Return the latest contexts of a worker, and the one whose nodes are asked for, with its nodes."""
    alive = agent.autograd.contexts.all()
    latest = max(0, len(alive) - _MOST_CONTEXTS)
    return tuple(
        _context_view(agent, context, with_nodes=request.nodes in (-1, context.id))
        for number, context in enumerate(alive)
        if number >= latest or context.id == request.nodes
    )


def _context_view(agent: Agent, context: DistAutogradContext, *, with_nodes: bool) -> ContextView:
    name_of, me = agent.autograd.messaging.name_of, agent.me.name
    with context.lock:
        sends, recvs = list(context.sends.values()), list(context.recvs.values())
    return ContextView(
        context.id,
        context.began,
        tuple(sorted(map(name_of, context.workers()))),
        tuple(
            Edge(send.message, me, name_of(send.target), len(send), _shapes(send.expected()))
            for send in sends[:_MOST_EDGES]
        ),
        tuple(Edge(recv.message, recv.source_name, me, recv.count) for recv in recvs[:_MOST_EDGES]),
        len(context.gradients.as_dict()),
        nodes_of(context) if with_nodes else (),
    )


def _shapes(expected: Iterable[tuple[Any, Any, Any]]) -> tuple[str, ...]:
    shapes = [type_and_shape(dtype, shape) for shape, dtype, _ in expected]
    return tuple(shapes[:_MOST_SHAPES])
