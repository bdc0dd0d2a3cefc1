"""Makes a large graph readable: folds what belongs together into one node, step by step, until few enough are left.

First leaves into the operation that they feed, then chains of operations, leaves that several operations share, and
operations into the only one that leads to them. At last all operations of a worker that are connected and that
gradients reach after the same number of messages, so this makes no cycles. Sends, recvs and roots are never folded:
they are what the graph is about.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator

from telegrad.observe.graph import ContextGraph, GraphEdge, GraphNode
from telegrad.observe.graph_layout import columns_of

READABLE = 60
"""So many nodes are drawn as they are."""
_RANK = ("", "skipped", "done", "waits", "runs")
_SHOWN = 24  # lines of details of a group
_NUMBER = re.compile(r" (?:\+\d+|\(\d+\))$")


def fold(graph: ContextGraph, most: int = READABLE) -> ContextGraph:
    """Return the graph with at most `most` nodes, or as few as can be. A smaller one is returned as it is."""
    for groups in (_leaves, _chains, _shared_leaves, _trees, _components):
        if len(graph.nodes) <= most:
            return graph
        graph = _merge(graph, groups(graph))
    return graph


Groups = Iterator[list[GraphNode]]


def _leaves(graph: ContextGraph) -> Groups:
    """Yield operations with the leaves, or transposes of leaves, that only they feed."""
    nodes, following, before = _neighbours(graph)
    for node in graph.nodes:
        if not _is_operation(node):
            continue
        group = [node]
        for key in following[node.key]:
            rest = following[key]
            if not _foldable(nodes[key]) or len(before[key]) != 1:
                continue
            if not rest:
                group.append(nodes[key])
            elif len(rest) == 1 and nodes[rest[0]].kind == "leaf" and len(before[rest[0]]) == 1:
                group += [nodes[key], nodes[rest[0]]]
        yield group


def _shared_leaves(graph: ContextGraph) -> Groups:
    """Yield the leaves of each worker."""
    for worker in graph.workers:
        yield [node for node in graph.nodes if node.worker == worker and node.kind == "leaf"]


def _trees(graph: ContextGraph) -> Groups:
    """Yield operations with those that only they lead to, directly or not."""
    nodes, following, before = _neighbours(graph)

    def only_source(key: str) -> bool:
        return len(before[key]) == 1 and _is_operation(nodes[before[key][0]])

    for node in graph.nodes:
        if not _is_operation(node) or only_source(node.key):
            continue
        group, stack = [], [node.key]
        while stack:
            key = stack.pop()
            group.append(nodes[key])
            stack += [each for each in following[key] if _is_operation(nodes[each]) and only_source(each)]
        yield group


def _chains(graph: ContextGraph) -> Groups:
    """Yield operations that follow each other without a branch."""
    nodes, following, before = _neighbours(graph)

    def next_of(key: str) -> str | None:
        targets = following[key]
        if len(targets) != 1 or len(before[targets[0]]) != 1:
            return None
        target = nodes[targets[0]]
        return target.key if _is_operation(target) else None

    inner = {next_of(node.key) for node in graph.nodes if _is_operation(node)}
    for node in graph.nodes:
        if not _is_operation(node) or node.key in inner:
            continue
        chain: list[GraphNode] = []
        key: str | None = node.key
        while key is not None and len(chain) <= len(nodes):
            chain.append(nodes[key])
            key = next_of(key)
        yield chain


def _components(graph: ContextGraph) -> Groups:
    """Yield what is connected on one worker, as many messages behind the beginning."""
    nodes, following, before = _neighbours(graph)
    hops = _hops(graph)
    seen: set[str] = set()
    for node in graph.nodes:
        if node.key in seen or not _is_operation(node):
            continue
        group, stack = [], [node.key]
        seen.add(node.key)
        while stack:
            key = stack.pop()
            group.append(nodes[key])
            for other in (*following[key], *before[key]):
                if other not in seen and _is_operation(nodes[other]) and hops[other] == hops[key]:
                    seen.add(other)
                    stack.append(other)
        yield group


def _hops(graph: ContextGraph) -> dict[str, int]:
    """Return how many messages there are on the way to each node, at most."""
    columns = columns_of(graph)
    hops = dict.fromkeys(columns, 0)
    for edge in sorted(graph.edges, key=lambda edge: columns[edge.source]):
        if columns[edge.source] < columns[edge.target]:  # else it closes a cycle
            hops[edge.target] = max(hops[edge.target], hops[edge.source] + bool(edge.message))
    return hops


def _neighbours(graph: ContextGraph) -> tuple[dict[str, GraphNode], dict[str, list[str]], dict[str, list[str]]]:
    following: dict[str, list[str]] = defaultdict(list)
    before: dict[str, list[str]] = defaultdict(list)
    for edge in graph.edges:
        following[edge.source].append(edge.target)
        before[edge.target].append(edge.source)
    return {node.key: node for node in graph.nodes}, following, before


def _foldable(node: GraphNode) -> bool:
    return node.kind in ("op", "leaf", "group")


def _is_operation(node: GraphNode) -> bool:
    return node.kind in ("op", "group")


def _merge(graph: ContextGraph, groups: Groups) -> ContextGraph:
    into: dict[str, GraphNode] = {}
    columns = columns_of(graph)
    for found in groups:
        group = sorted((node for node in found if node.key not in into), key=lambda node: columns[node.key])
        if len(group) > 1:
            merged = _group(group)
            into.update({node.key: merged for node in group})
    place: Callable[[str], str] = lambda key: into[key].key if key in into else key  # noqa: E731 - used three times
    nodes = dict.fromkeys(into.get(node.key, node) for node in graph.nodes)
    edges = (GraphEdge(place(edge.source), place(edge.target), edge.message, edge.shapes) for edge in graph.edges)
    kept = dict.fromkeys(edge for edge in edges if edge.source != edge.target)
    return ContextGraph(graph.context, graph.workers, tuple(nodes), tuple(kept), graph.silent)


def _group(group: list[GraphNode]) -> GraphNode:
    ops = [node for node in group if node.kind != "leaf"]
    count = sum(node.count for node in group)
    names = [name for node in ops for name in _NUMBER.sub("", node.name).split(" … ")]
    if not ops:
        name = f"{count} leaves"
    elif len(ops) == 1 and ops[0].kind == "op":
        name = f"{names[0]} +{count - 1}"
    else:
        name = f"{names[0]} … {names[-1]} ({count})"
    details = [line for node in group for line in (node.details if node.count > 1 else node.details[-1:])]
    if len(details) > _SHOWN:
        details = [*details[: _SHOWN - 1], f"and {len(details) - _SHOWN + 1} more"]
    state = max((node.state for node in group), key=_RANK.index)
    kind = "group" if ops else "leaf"
    return GraphNode(f"{group[0].key}*", group[0].worker, kind, name, tuple(details), state, count)
