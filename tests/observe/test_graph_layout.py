from __future__ import annotations

from collections import defaultdict
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.made_up_graphs import pipeline_views, random_views

from telegrad.observe.graph import ContextGraph, GraphEdge, GraphNode, join
from telegrad.observe.graph_layout import arrange, columns_of


@given(st.integers(0, 2**32), st.integers(1, 4), st.integers(0, 40))
@settings(max_examples=40, deadline=None)
def test_nothing_overlaps_and_gradients_flow_to_the_right(seed: int, workers: int, nodes: int) -> None:
    graph = join(5, random_views(seed, workers, nodes))
    layout = arrange(graph)
    cells = defaultdict(list)
    for place in [*layout.nodes.values(), *(bend for bends in layout.bends for bend in bends)]:
        assert -0.001 <= place.row <= layout.rows[place.lane] - 1 + 0.001
        assert 0 <= place.column < layout.columns
        cells[place.lane, place.column].append(place.row)
    for rows in cells.values():
        rows.sort()
        assert all(below - above >= 0.999 for above, below in pairwise(rows))
    for edge, bends in zip(graph.edges, layout.bends, strict=True):
        columns = [place.column for place in (layout.nodes[edge.source], *bends, layout.nodes[edge.target])]
        assert columns == list(range(columns[0], columns[0] + len(columns)))


def test_the_same_graph_is_always_arranged_in_the_same_way() -> None:
    assert arrange(join(5, random_views(3, 3, 40))) == arrange(join(5, random_views(3, 3, 40)))


def test_what_nothing_leads_to_is_next_to_what_it_leads_to() -> None:
    nodes = [GraphNode(key, "a", "op", key) for key in "abcx"]
    edges = [GraphEdge("a", "b"), GraphEdge("b", "c"), GraphEdge("x", "c")]
    assert columns_of(ContextGraph(1, ("a",), tuple(nodes), tuple(edges))) == {"a": 0, "b": 1, "c": 2, "x": 1}


def test_a_cycle_is_shown_too() -> None:
    nodes = [GraphNode(key, "a", "op", key) for key in "abc"]
    edges = [GraphEdge("a", "b"), GraphEdge("b", "c"), GraphEdge("c", "a")]
    layout = arrange(ContextGraph(1, ("a",), tuple(nodes), tuple(edges)))
    assert {key: place.column for key, place in layout.nodes.items()} == {"a": 0, "b": 1, "c": 2}


def test_a_pipeline_runs_through_the_lanes() -> None:
    layout = arrange(join(5, pipeline_views(3, operations=1, leaves=0)))
    order = sorted(layout.nodes, key=lambda key: layout.nodes[key].column)
    assert [(key[:2], layout.nodes[key].lane) for key in order] == [
        *[("w2", 2)] * 3,
        *[("w1", 1)] * 3,
        *[("w0", 0)] * 2,
    ]
