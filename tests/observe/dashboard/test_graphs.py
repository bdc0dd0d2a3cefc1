from __future__ import annotations

from tests.support.synthetic_group import STEP, SyntheticGroup

from telegrad.observe.dashboard.graphs import MOST_EDGES, MOST_ENDED, MOST_PASSES, Graphs
from telegrad.observe.model import ContextView, Edge, Event, GroupView, Kind, WorkerView


def worker(name: str, *contexts: ContextView, events: tuple[Event, ...] = ()) -> WorkerView:
    return WorkerView(name, 0, 1, 0, "host", 1, (), 100.0, 0.0, 0.0, contexts=contexts, events=events)


def sent(message: int, peer: str, pass_id: int = 1, context: int = 5) -> Event:
    return Event(message, Kind.GRADIENT_SENT, 3.0, 3.0, message, peer, context=context, pass_id=pass_id, size=8)


def arrived(message: int, peer: str) -> Event:
    return Event(message, Kind.GRADIENT_ARRIVED, 4.0, 4.0, message, peer, context=5, pass_id=1)


def test_what_both_ends_tell_of_an_edge_is_put_together() -> None:
    edge = Edge(7, "a", "b", 2, ("float32[3]",))
    context = ContextView(5, 1.0, ("b",), sends=(edge,))
    other = ContextView(5, 1.0, ("a",), receives=(Edge(7, "a", "b", 2),))
    view = GroupView(
        (worker("a", context, events=(arrived(7, "b"),)), worker("b", other, events=(sent(7, "a"),))), now=9.0
    )
    (graph,) = Graphs().add(view)
    assert graph.workers == ["a", "b"]
    found = graph.edges["7"]
    assert (found.source, found.target, found.shapes) == ("a", "b", ("float32[3]",))
    assert (found.flows["1"].sent, found.flows["1"].arrived, found.flows["1"].size) == (3.0, 4.0, 8)


def test_a_pass_that_was_over_between_two_looks_is_drawn_from_its_gradients() -> None:
    (graph,) = Graphs().add(GroupView((worker("b", events=(sent(7, "a"),)),), now=9.0))
    assert (graph.edges["7"].source, graph.edges["7"].target) == ("a", "b")
    assert graph.ended is not None


def test_an_edge_without_gradient_stays_without_when_the_pass_is_over() -> None:
    group, graphs = SyntheticGroup(), Graphs()
    for look in range(8):
        graphs.add(group.view(group.began + 10 * STEP + look * STEP / 4))
    graph = next(graph for graph in graphs.all() if graph.context == str(group.context(10)))
    flows = {(edge.source, edge.target, *edge.shapes): len(edge.flows) for edge in graph.edges.values()}
    assert flows["stage0", "trainer", "float32[32, 10]"] == 0
    assert flows["stage0", "trainer", "float32[32, 512]"] == 1
    assert graph.passes["11"].driver == "trainer"


def test_only_graphs_that_changed_are_returned() -> None:
    graphs = Graphs()
    view = GroupView((worker("a", ContextView(5, 1.0, ("b",))),), now=9.0)
    assert len(graphs.add(view)) == 1
    assert graphs.add(view) == []


def test_ended_contexts_edges_and_passes_are_bounded() -> None:
    graphs = Graphs()
    for context in range(1, 3 * MOST_ENDED):
        events = tuple(sent(message, "a", context=context) for message in range(1, 3))
        graphs.add(GroupView((worker("b", events=events),), now=9.0))
    assert len(graphs.all()) == MOST_ENDED
    edges = tuple(Edge(number, "a", "b", 1) for number in range(1, MOST_EDGES + 4))
    passes = tuple(sent(1, "a", pass_id=number) for number in range(1, 3 * MOST_PASSES))
    (graph,) = graphs.add(GroupView((worker("b", ContextView(5, 1.0, receives=edges), events=passes),), now=9.0))
    assert len(graph.edges) == MOST_EDGES
    assert graph.left_out == 3
    looked_again = GroupView((worker("b", ContextView(5, 1.0, receives=edges)),), now=9.5)
    assert graphs.add(looked_again) == []
    assert graph.left_out == 3
    assert len(graph.passes) == len(graph.edges["1"].flows) == MOST_PASSES
