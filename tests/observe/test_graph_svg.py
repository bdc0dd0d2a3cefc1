from __future__ import annotations

from xml.etree import ElementTree

from tests.support.made_up_graphs import pipeline_views, random_views

from telegrad.observe.graph import ContextGraph, GraphNode, join
from telegrad.observe.graph_svg import render_graph

SVG = "{http://www.w3.org/2000/svg}"


def texts(picture: str) -> list[str]:
    return [text.text or "" for text in ElementTree.fromstring(picture).iter(f"{SVG}text")]


def test_every_node_and_worker_is_drawn() -> None:
    graph = join(5, pipeline_views())
    drawn = texts(render_graph(graph))
    for node in graph.nodes:
        assert drawn.count(node.name) >= 1
    assert {"w0", "w1", "w2", "Context 0x5"} <= set(drawn)
    assert len(list(ElementTree.fromstring(render_graph(graph)).iter(f"{SVG}path"))) == len(graph.edges) + 2


def test_boxes_do_not_overlap_and_are_inside_the_picture() -> None:
    for seed in range(5):
        root = ElementTree.fromstring(render_graph(join(5, random_views(seed, 3, 40))))
        width, height = float(root.attrib["width"]), float(root.attrib["height"])
        boxes = []
        for group in root.iter(f"{SVG}g"):
            box = group.find(f"{SVG}rect")
            if box is not None:
                boxes.append([float(box.attrib[name]) for name in ("x", "y", "width", "height")])
        assert boxes
        for number, (x, y, w, h) in enumerate(boxes):
            assert x > 0
            assert y > 0
            assert x + w < width
            assert y + h < height
            for other_x, other_y, other_w, other_h in boxes[:number]:
                apart = x + w <= other_x or other_x + other_w <= x or y + h <= other_y or other_y + other_h <= y
                assert apart


def test_names_of_users_cannot_break_the_picture() -> None:
    node = GraphNode("k", "<&>", "op", "<script>&\"'" * 5, ("a<b",))
    drawn = texts(render_graph(ContextGraph(1, ("<&>",), (node,), (), {"<&>": "<gone>"})))
    assert "<&>" in drawn
    assert "did not answer: <gone>" in drawn
    assert any(text.startswith("<script>&") and text.endswith("…") for text in drawn)


def test_control_characters_in_names_leave_the_picture_readable() -> None:
    node = GraphNode("k", "a\x1b[2J", "op", "f\x00\x08", ("\x9b",))
    drawn = texts(render_graph(ContextGraph(1, ("a\x1b[2J",), (node,), (), {})))  # it parses, so it is XML
    assert "a\\x1b[2J" in drawn
    assert "f\\x00\\x08" in drawn


def test_the_same_graph_gives_the_same_bytes() -> None:
    assert render_graph(join(5, random_views(1, 3, 30))) == render_graph(join(5, random_views(1, 3, 30)))
