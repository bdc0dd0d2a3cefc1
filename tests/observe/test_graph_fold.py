from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.made_up_graphs import pipeline_views, random_views

from telegrad.observe.graph import ContextGraph, join
from telegrad.observe.graph_fold import READABLE, fold
from telegrad.observe.model import ContextView, Node


def reachable(graph: ContextGraph) -> set[tuple[str, str]]:
    """Return which sends, recvs and roots lead to which others."""
    following: dict[str, set[str]] = {}
    for edge in graph.edges:
        following.setdefault(edge.source, set()).add(edge.target)
    kinds = {node.key: node.kind for node in graph.nodes}
    found = set()
    for start in [key for key, kind in kinds.items() if kind in ("send", "recv", "root")]:
        stack, seen = [start], set()
        while stack:
            for target in following.get(stack.pop(), ()):
                if target not in seen:
                    seen.add(target)
                    stack.append(target)
        found |= {(start, key) for key in seen if kinds[key] in ("send", "recv", "root")}
    return found


def test_a_graph_that_can_be_read_is_not_changed() -> None:
    graph = join(5, pipeline_views())
    assert fold(graph) is graph


def test_leaves_are_folded_first_and_chains_next() -> None:
    graph = join(5, pipeline_views(2, operations=4, leaves=2))
    assert len(graph.nodes) == 27
    without_leaves = fold(graph, 12)
    assert sorted(node.name for node in without_leaves.nodes if node.worker == "w0") == [
        *("Op0 +2", "Op1 +2", "Op2 +2", "Op3 +2"),
        "send m1",
    ]
    chains = fold(graph, 6)
    assert [node.name for node in chains.nodes if node.kind == "group"] == ["Op0 … Op3 (12)"] * 2


def test_operations_that_share_only_leaves_are_not_folded_into_one() -> None:
    """Three micro-batches of a layer, with a weight that is transposed for each, and a bias."""
    nodes = [Node(1, "AccumulateGrad", leaf="float32[8, 8]"), Node(2, "AccumulateGrad", leaf="float32[8]")]
    for number in (10, 20, 30):
        nodes.append(Node(number, "SendRpcBackward", (number + 1,), sends=number))
        nodes.append(Node(number + 1, "TanhBackward0", (number + 2,)))
        nodes.append(Node(number + 2, "AddmmBackward0", (2, number + 3, number + 4)))
        nodes.append(Node(number + 3, "TBackward0", (1,)))
        nodes.append(Node(number + 4, "RecvRpcBackward", receives=number + 5))
    folded = fold(join(5, {"a": ContextView(5, 0.0, nodes=tuple(nodes))}), 10)
    assert sorted(node.name for node in folded.nodes if node.kind not in ("send", "recv")) == [
        "2 leaves",
        *["Tanh … T (3)"] * 3,
    ]


def test_a_large_graph_becomes_readable() -> None:
    graph = join(5, pipeline_views(4, operations=100, leaves=2))
    folded = fold(graph)
    assert len(graph.nodes) > 1000
    assert len(folded.nodes) <= READABLE


@given(st.integers(0, 2**32), st.integers(1, 4), st.integers(1, 50))
@settings(max_examples=40, deadline=None)
def test_a_folded_graph_keeps_every_node_and_way_and_makes_no_cycles(seed: int, workers: int, nodes: int) -> None:
    graph = join(5, random_views(seed, workers, nodes))
    folded = fold(graph, 1)
    assert sum(node.count for node in folded.nodes) == len(graph.nodes)
    keys = {node.key for node in folded.nodes}
    assert all(edge.source in keys and edge.target in keys for edge in folded.edges)
    assert reachable(graph) <= reachable(folded)
    assert all(start != end for start, end in reachable(folded))
    waiting = {edge.target for edge in folded.edges}
    edges = list(folded.edges)
    while edges:  # what nothing leads to is taken away, until nothing is left
        left = [edge for edge in edges if edge.source in waiting]
        assert len(left) < len(edges), "a cycle"
        edges, waiting = left, {edge.target for edge in left}
