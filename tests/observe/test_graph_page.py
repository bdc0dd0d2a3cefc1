from __future__ import annotations

import json
import re

from tests.support.made_up_graphs import pipeline_views, random_views

from telegrad.observe.graph import ContextGraph, GraphNode, join
from telegrad.observe.graph_page import page_data, render_page


def embedded(page: str) -> dict[str, object]:
    found = re.search(r'<script id="graph" type="application/json">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    data: dict[str, object] = json.loads(found[1])
    return data


def test_the_page_contains_the_whole_graph() -> None:
    graph = join(5, random_views(2, 3, 40))
    data = page_data(graph)
    assert [node["name"] for node in data["nodes"]] == [node.name for node in graph.nodes]
    assert len(data["edges"]) == len(graph.edges)
    assert [lane["name"] for lane in data["lanes"]] == list(graph.workers)
    assert embedded(render_page(graph)) == json.loads(json.dumps(data))


def test_the_page_loads_nothing() -> None:
    page = render_page(join(5, pipeline_views()))
    assert "default-src 'none'" in page
    addresses = set(re.findall(r"https?://[^\"' ]+", page))
    assert addresses == {"http://www.w3.org/2000/svg"}  # the name of a namespace
    assert not re.search(r"\b(?:src|href)=", page)


def test_names_of_users_cannot_leave_the_data() -> None:
    evil = "</script><script>alert(1)</script><!--"
    graph = ContextGraph(1, (evil,), (GraphNode("k", evil, "op", evil, (evil,)),), ())
    page = render_page(graph)
    assert evil not in page
    assert page.count("</script>") == 2
    assert embedded(page)["nodes"][0]["name"] == evil  # type: ignore[index] - it is a list
