from __future__ import annotations

from tests.support.made_up_graphs import pipeline_views

from telegrad.observe.graph import GraphEdge, join
from telegrad.observe.model import ContextView, Edge, Node


def test_the_parts_of_all_workers_are_joined_by_their_messages() -> None:
    graph = join(5, pipeline_views())
    assert graph.workers == ("w0", "w1", "w2")
    messages = [edge for edge in graph.edges if edge.message]
    assert messages == [
        GraphEdge("w1:8", "w0:1", "m1", ("float32[4]",)),
        GraphEdge("w2:8", "w1:1", "m2", ("float32[4]",)),
    ]
    names = {node.key: node.name for node in graph.nodes}
    assert names["w1:8"] == "recv m1"
    assert names["w0:1"] == "send m1"
    assert names["w0:2"] == "Op0"


def test_nodes_say_what_they_are() -> None:
    nodes = (
        Node(1, "backward()", (2,), state="done"),
        Node(2, "AddmmBackward0", (3, 4), state="runs"),
        Node(3, "AccumulateGrad", leaf="float32[3, 4]"),
        Node(4, "..."),
    )
    graph = join(5, {"a": ContextView(5, 0.0, nodes=nodes)})
    assert [(node.kind, node.name, node.state) for node in graph.nodes] == [
        ("root", "backward()", "done"),
        ("op", "Addmm", "runs"),
        ("leaf", "float32[3, 4]", ""),
        ("more", "...", ""),
    ]


def test_a_message_node_says_what_was_sent_from_where_to_where() -> None:
    (send,) = (node for node in join(5, pipeline_views(2)).nodes if node.kind == "send")
    assert send.details == ("SendRpcBackward", "message 0x100", "from w0 to w1", "float32[4]")


def test_the_side_of_a_worker_that_did_not_answer_is_completed() -> None:
    views = pipeline_views()
    del views["w1"]
    graph = join(5, views, {"w1": "it is lost"})
    assert graph.workers == ("w0", "w2", "w1")
    lost = [(node.kind, node.name, node.details[-1]) for node in graph.nodes if node.worker == "w1"]
    assert sorted(lost) == [
        ("recv", "recv m1", "its graph is not known"),
        ("send", "send m2", "its graph is not known"),
    ]
    assert len([edge for edge in graph.edges if edge.message]) == 2
    assert graph.silent == {"w1": "it is lost"}


def test_views_without_nodes_give_the_graph_of_messages() -> None:
    edge = Edge(7, "a", "b", 1)
    views = {"a": ContextView(5, 0.0, sends=(edge,)), "b": ContextView(5, 0.0, receives=(edge,))}
    graph = join(5, views)
    assert [(node.worker, node.name) for node in graph.nodes] == [("a", "send m1"), ("b", "recv m1")]
    assert [(edge.source[0], edge.target[0]) for edge in graph.edges] == [("b", "a")]


def test_edges_to_nodes_that_are_not_known_are_left_out() -> None:
    graph = join(5, {"a": ContextView(5, 0.0, nodes=(Node(1, "MulBackward0", (2, 3)), Node(2, "TBackward0")))})
    assert [(edge.source, edge.target) for edge in graph.edges] == [("a:1", "a:2")]


def test_sends_that_the_roots_do_not_lead_to_are_not_reached() -> None:
    used, unused = Edge(1, "b", "a", 1), Edge(2, "b", "a", 1)
    roots = (
        Node(1, "backward()", (2,), state="done"),
        Node(2, "RecvRpcBackward", receives=1, state="done"),
        Node(3, "RecvRpcBackward", receives=2),
    )
    sends = (
        Node(1, "SendRpcBackward", (2,), sends=1, state="waits"),
        Node(2, "AccumulateGrad", leaf="float32[1]", state="waits"),
        Node(3, "SendRpcBackward", (4,), sends=2, state="waits"),
        Node(4, "AccumulateGrad", leaf="float32[2]", state="waits"),
    )
    views = {
        "a": ContextView(5, 0.0, receives=(used, unused), nodes=roots),
        "b": ContextView(5, 0.0, sends=(used, unused), nodes=sends),
    }
    states = {node.key: node.state for node in join(5, views).nodes}
    assert [states[f"a:{node}"] for node in (1, 2, 3)] == ["done", "done", "skipped"]
    assert [states[f"b:{node}"] for node in (1, 2, 3, 4)] == ["waits", "waits", "skipped", "skipped"]
    silent = {"a": views["a"]}  # what b does with the gradient is not known
    assert "skipped" not in {node.state for node in join(5, silent, {"b": "lost"}).nodes}
