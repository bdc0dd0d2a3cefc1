"""The distributed graphs of autograd contexts, as they are recorded and as gradients flow back through them.

An edge is a message that carried tensors which need gradients. Both ends know its id, so what sender and receiver
tell of it is put together here. A gradient travels the edge in the other direction: the receiver's worker sends it, and
the sender's gets it. Contexts that have ended are kept for a while, because most passes take less time than one look.
"""

from __future__ import annotations

import msgspec

from telegrad.observe.dashboard.spans import identifier
from telegrad.observe.model import Edge, Event, GroupView, Kind, WorkerView

MOST_ENDED = 12
MOST_LIVE = 32
MOST_EDGES = 400
"""Edges of one graph. More cannot be drawn so that anyone could read them."""
MOST_PASSES = 4


class Flow(msgspec.Struct):
    """The gradient of one edge in one pass."""

    sent: float | None = None
    arrived: float | None = None
    size: int = 0


class GraphEdge(msgspec.Struct):
    """Tensors that were sent in a context, and what became of their gradients."""

    message: str
    source: str
    target: str
    order: int
    """Its place in the order in which this dashboard learned of the edges."""
    tensors: int = 0
    shapes: tuple[str, ...] = ()
    flows: dict[str, Flow] = {}
    """By pass."""


class GraphPass(msgspec.Struct):
    """One backward pass of a context."""

    id: str
    driver: str = ""
    began: float | None = None
    ended: float | None = None
    outcome: str = ""
    spans: list[tuple[str, float, float, str]] = []
    """What ran where: worker, from when to when, kind."""


class Graph(msgspec.Struct):
    """A context with its edges and passes."""

    context: str
    began: float
    ended: float | None = None
    workers: list[str] = []
    edges: dict[str, GraphEdge] = {}
    passes: dict[str, GraphPass] = {}
    left_out: int = 0
    """Edges beyond `MOST_EDGES`, as far as workers list them."""
    version: int = 0
    """Counts up with every change."""


class Graphs:
    """The graphs of contexts that exist, and of those that ended last."""

    def __init__(self) -> None:
        self._graphs: dict[int, Graph] = {}

    def add(self, view: GroupView) -> list[Graph]:
        """Take a view, and return the graphs that it has changed."""
        before = {context: graph.version for context, graph in self._graphs.items()}
        alive = set()
        for worker in view.workers:
            offset = view.offsets.get(worker.name, 0.0)
            alive |= self._take_contexts(worker, offset)
        self._count_left_out(view)
        for worker in view.workers:
            offset = view.offsets.get(worker.name, 0.0)
            for event in worker.events:
                if event.context:
                    self._take_event(worker.name, event, offset)
        for context, graph in self._graphs.items():
            if graph.ended is None and context not in alive:
                graph.ended = view.now
                graph.version += 1
        self._forget()
        return [graph for context, graph in self._graphs.items() if before.get(context) != graph.version]

    def all(self) -> list[Graph]:
        """Return all graphs, oldest first."""
        return list(self._graphs.values())

    def _forget(self) -> None:
        ended = [context for context, graph in self._graphs.items() if graph.ended is not None]
        live = [context for context, graph in self._graphs.items() if graph.ended is None]
        # A graph with edges tells more than one without.
        ended.sort(key=lambda context: bool(self._graphs[context].edges))
        for context in [*ended[: max(0, len(ended) - MOST_ENDED)], *live[: max(0, len(live) - MOST_LIVE)]]:
            del self._graphs[context]

    def _graph(self, context: int, began: float) -> Graph:
        graph = self._graphs.get(context)
        if graph is None:
            graph = self._graphs[context] = Graph(identifier(context), began)
        return graph

    def _take_contexts(self, worker: WorkerView, offset: float) -> set[int]:
        for context in worker.contexts:
            graph = self._graph(context.id, context.began + offset)
            graph.began = min(graph.began, context.began + offset)
            if graph.ended is not None:
                graph.ended = None
                graph.version += 1
            for name in (worker.name, *context.workers):
                _add_worker(graph, name)
            for edge in (*context.sends, *context.receives):
                _add_edge(graph, edge)
        for running in worker.passes:
            graph = self._graph(running.context, running.began + offset)
            found = _pass(graph, running.id)
            if found is not None and (found.began is None or running.driver != found.driver):
                found.began = running.began + offset
                found.driver = running.driver
                graph.version += 1
        return {context.id for context in worker.contexts} | {running.context for running in worker.passes}

    def _count_left_out(self, view: GroupView) -> None:
        """Count the edges that there was no room for: both ends tell of each, with every look."""
        told: dict[int, set[str]] = {}
        for worker in view.workers:
            for context in worker.contexts:
                edges = (*context.sends, *context.receives)
                told.setdefault(context.id, set()).update(identifier(edge.message) for edge in edges)
        for number, messages in told.items():
            graph = self._graphs[number]
            left_out = len(messages - graph.edges.keys())
            if left_out != graph.left_out:
                graph.left_out = left_out
                graph.version += 1

    def _take_event(self, worker: str, event: Event, offset: float) -> None:
        graph = self._graph(event.context, event.began + offset)
        _add_worker(graph, worker)
        if event.kind is Kind.GRADIENT_SENT:
            _flow(graph, event, event.peer, worker).sent = event.ended + offset
            _flow(graph, event, event.peer, worker).size = event.size
        elif event.kind is Kind.GRADIENT_ARRIVED:
            _flow(graph, event, worker, event.peer).arrived = event.ended + offset
        elif event.kind in (Kind.PASS, Kind.ISLAND, Kind.GATE, Kind.PROBE) and event.pass_id:
            _take_pass(graph, worker, event, offset)
        elif event.kind is Kind.CONTEXT:
            graph.began = min(graph.began, event.began + offset)
        else:
            return
        graph.version += 1


def _add_worker(graph: Graph, name: str) -> None:
    if name not in graph.workers:
        graph.workers.append(name)
        graph.version += 1


def _add_edge(graph: Graph, edge: Edge) -> GraphEdge | None:
    message = identifier(edge.message)
    found = graph.edges.get(message)
    if found is None:
        if len(graph.edges) >= MOST_EDGES:
            return None
        _add_worker(graph, edge.source)
        _add_worker(graph, edge.target)
        found = graph.edges[message] = GraphEdge(message, edge.source, edge.target, len(graph.edges))
        graph.version += 1
    if edge.tensors and not (found.tensors and found.shapes):  # only the sender knows shapes
        told = (edge.tensors, edge.shapes or found.shapes)
        if told != (found.tensors, found.shapes):
            found.tensors, found.shapes = told
            graph.version += 1
    return found


def _flow(graph: Graph, event: Event, source: str, target: str) -> Flow:
    """Return the gradient that an event is about. Its edge goes from `source` to `target`."""
    edge = _add_edge(graph, Edge(event.id, source, target, 0))
    if edge is None:
        return Flow()
    _pass(graph, event.pass_id)
    return edge.flows.setdefault(identifier(event.pass_id), Flow())


def _pass(graph: Graph, number: int) -> GraphPass | None:
    name = identifier(number)
    if name and name not in graph.passes:
        while len(graph.passes) >= MOST_PASSES:
            oldest = next(iter(graph.passes))
            del graph.passes[oldest]
            for edge in graph.edges.values():
                edge.flows.pop(oldest, None)
        graph.passes[name] = GraphPass(name)
        graph.version += 1
    return graph.passes.get(name)


def _take_pass(graph: Graph, worker: str, event: Event, offset: float) -> None:
    found = _pass(graph, event.pass_id)
    if found is None:
        return
    began, ended = event.began + offset, event.ended + offset
    if len(found.spans) < MOST_EDGES:
        found.spans.append((worker, began, ended, str(event.kind)))
    if event.kind is Kind.PASS:
        found.began = began if found.began is None else min(found.began, began)
        found.ended = ended if found.ended is None else max(found.ended, ended)
        found.outcome = found.outcome or event.outcome
