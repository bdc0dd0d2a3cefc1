"""Joins the views of a context on all workers to one graph: the way that gradients take, across workers.

An edge leads from a node to one that gets its gradients. Between workers it leads from the recv of a message to its
send. What one side has not told is completed from the other: a worker that did not answer still has its sends and
recvs.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

import msgspec

from telegrad.observe.model import ContextView, Node

_UNKNOWN = "its graph is not known"


class GraphNode(msgspec.Struct, frozen=True):
    """A node, or several that are shown as one."""

    key: str
    """Unique in its graph."""
    worker: str
    kind: str
    """"op", "leaf", "send", "recv", "root", "more", or "group" for several."""
    name: str
    """Short enough to be drawn."""
    details: tuple[str, ...] = ()
    """What else is known, in lines."""
    state: str = ""
    """In a pass: "", "waits", "runs", "done", "skipped"."""
    count: int = 1


class GraphEdge(msgspec.Struct, frozen=True):
    """Where gradients go from a node."""

    source: str
    target: str
    message: str = ""
    """The name of the message that they are the gradients of, if they leave the worker."""
    shapes: tuple[str, ...] = ()


class ContextGraph(msgspec.Struct, frozen=True):
    """The graph of one context. Workers and nodes have a fixed order."""

    context: int
    workers: tuple[str, ...]
    nodes: tuple[GraphNode, ...]
    edges: tuple[GraphEdge, ...]
    silent: dict[str, str] = {}
    """Workers that did not answer, and why."""


def join(context: int, views: Mapping[str, ContextView], silent: Mapping[str, str] | None = None) -> ContextGraph:
    """Return the graph of a context, from its views by worker. The order of workers is kept."""
    names = _message_names(views.values())
    shapes = {edge.message: edge.shapes for view in views.values() for edge in view.sends}
    texts: dict[int, list[str]] = {}
    for view in views.values():
        for edge in (*view.sends, *view.receives):
            lines = texts.setdefault(edge.message, [f"from {edge.source} to {edge.target}"])
            shown = ", ".join(edge.shapes)
            lines += [shown] if shown and shown not in lines else []
    nodes: dict[str, GraphNode] = {}
    edges: list[GraphEdge] = []
    ends: dict[tuple[str, int], str] = {}  # "send" or "recv" and a message: the key of its node
    for worker, view in views.items():
        for node in view.nodes:
            key = f"{worker}:{node.id}"
            nodes[key] = _node(key, worker, node, names, texts)
            edges += [GraphEdge(key, f"{worker}:{target}") for target in node.inputs]
            if node.sends:
                ends["send", node.sends] = key
            if node.receives:
                ends["recv", node.receives] = key
    for view in views.values():
        for edge in (*view.sends, *view.receives):
            for kind, worker in (("send", edge.source), ("recv", edge.target)):
                if (kind, edge.message) not in ends:
                    key = ends[kind, edge.message] = f"{worker}:{kind} {edge.message:#x}"
                    details = (f"message {edge.message:#x}", *texts[edge.message], _UNKNOWN)
                    nodes[key] = GraphNode(key, worker, kind, f"{kind} {names[edge.message]}", details)
    for message in sorted({message for _, message in ends}):
        source, target = ends.get(("recv", message)), ends.get(("send", message))
        if source is not None and target is not None:
            edges.append(GraphEdge(source, target, names.get(message, ""), shapes.get(message, ())))
    known = set(nodes)
    workers = dict.fromkeys([*views, *(node.worker for node in nodes.values())])
    edges = [edge for edge in dict.fromkeys(edges) if edge.source in known and edge.target in known]
    found = _mark_unreached(list(nodes.values()), edges)
    return ContextGraph(context, tuple(workers), tuple(found), tuple(edges), dict(silent or {}))


def _mark_unreached(nodes: list[GraphNode], edges: Iterable[GraphEdge]) -> list[GraphNode]:
    """Say of nodes that the roots of a running pass do not lead to that they are not reached.

    A worker alone cannot know that of its sends: for it, each may still get gradients.
    """
    targets: dict[str, list[str]] = {}
    for edge in edges:
        targets.setdefault(edge.source, []).append(edge.target)
    reached = {node.key for node in nodes if node.kind == "root" and node.state}
    if not reached:
        return nodes
    left = list(reached)
    while left:
        found = [key for key in targets.get(left.pop(), ()) if key not in reached]
        reached.update(found)
        left += found
    if any(node.kind == "more" or node.details[-1:] == (_UNKNOWN,) for node in nodes if node.key in reached):
        return nodes  # where these lead is not known
    return [
        msgspec.structs.replace(node, state="skipped")
        if node.key not in reached and node.state in ("", "waits")
        else node
        for node in nodes
    ]


def _message_names(views: Iterable[ContextView]) -> dict[int, str]:
    """Return short names of messages: their ids have 64 bits."""
    messages: set[int] = set()
    for view in views:
        messages.update(edge.message for edge in (*view.sends, *view.receives))
        for node in view.nodes:
            messages.update(message for message in (node.sends, node.receives) if message)
    return {message: f"m{number}" for number, message in enumerate(sorted(messages), 1)}


def _node(key: str, worker: str, node: Node, names: dict[int, str], texts: dict[int, list[str]]) -> GraphNode:
    message = node.sends or node.receives
    if message:
        kind = "send" if node.sends else "recv"
        details = [f"message {message:#x}", *texts.get(message, ())]
        return GraphNode(key, worker, kind, f"{kind} {names[message]}", (node.name, *details), node.state)
    if node.leaf:
        return GraphNode(key, worker, "leaf", node.leaf, (node.name, f"leaf {node.leaf}"), node.state)
    if node.name == "...":
        return GraphNode(key, worker, "more", "...", ("more nodes than were asked for",), node.state)
    if node.name == "backward()":
        return GraphNode(key, worker, "root", "backward()", ("the roots of the pass",), node.state)
    return GraphNode(key, worker, "op", short_name(node.name), (node.name,), node.state)


def short_name(name: str) -> str:
    """Return what an operation is called without what all have in common.

    >>> short_name("AddmmBackward0"), short_name("torch::autograd::CopySlices"), short_name("Backward0")
    ('Addmm', 'CopySlices', 'Backward0')
    """
    plain = name.rpartition("::")[2]
    return re.sub(r"(?<=.)Backward\d*$", "", plain)
