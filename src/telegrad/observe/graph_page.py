"""Writes the graph of a context as one HTML page that needs nothing else: to pan, zoom, point at, and fold workers."""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any

from telegrad.observe.graph import ContextGraph
from telegrad.observe.graph_svg import (
    KINDS,
    LANE_GAP,
    LANE_HEAD,
    MARGIN,
    NODE_HEIGHT,
    ROW,
    STATES,
    geometry,
    shown_name,
)


def render_page(graph: ContextGraph) -> str:
    """Return the page."""
    template = files(__package__).joinpath("graph_page.html").read_text(encoding="utf-8")
    data = json.dumps(page_data(graph), ensure_ascii=True)
    # Nothing in it may end the script element, or begin a comment in it: names come from the programs of users.
    return template.replace("GRAPH</script>", data.replace("<", "\\u003c").replace(">", "\\u003e") + "</script>", 1)


def page_data(graph: ContextGraph) -> dict[str, Any]:
    """Return what the page draws: the graph, and where everything is. Nodes are referred to by their index."""
    shape = geometry(graph)
    index = {node.key: number for number, node in enumerate(graph.nodes)}
    nodes = []
    for node in graph.nodes:
        place = shape.layout.nodes[node.key]
        nodes.append(
            {
                "name": node.name,
                "label": shown_name(node),
                "kind": node.kind,
                "details": node.details,
                "state": node.state,
                "count": node.count,
                "lane": place.lane,
                "row": round(place.row, 3),
                "x": round(shape.center(place), 1),
                "width": round(shape.widths[node.key], 1),
            }
        )
    edges = []
    for edge, bends in zip(graph.edges, shape.layout.bends, strict=True):
        points = []
        for bend in bends:
            left = shape.lefts[bend.column]
            right = left + shape.column_widths[bend.column]
            points.append((round(left, 1), round(right, 1), bend.lane, round(bend.row, 3)))
        ends = {"source": index[edge.source], "target": index[edge.target]}
        edges.append({**ends, "message": edge.message, "shapes": edge.shapes, "bends": points})
    lanes = []
    for worker, rows in zip(graph.workers, shape.layout.rows, strict=True):
        silent = f"did not answer: {graph.silent[worker]}" if worker in graph.silent else ""
        lanes.append({"name": worker, "rows": rows, "silent": silent})
    used_kinds, used_states = {node.kind for node in graph.nodes}, {node.state for node in graph.nodes}
    legend = [
        (fill, border, text, False) for kind, (fill, border, text) in KINDS.items() if text and kind in used_kinds
    ]
    legend += [
        ("#ffffff", border, text, bool(dash)) for state, (border, dash, text) in STATES.items() if state in used_states
    ]
    return {
        "context": f"{graph.context:#x}",
        "total": sum(node.count for node in graph.nodes),
        "width": round(shape.width, 1),
        "sizes": {"head": LANE_HEAD, "row": ROW, "gap": LANE_GAP, "margin": MARGIN, "node": NODE_HEIGHT},
        "lanes": lanes,
        "nodes": nodes,
        "edges": edges,
        "kinds": KINDS,
        "states": STATES,
        "legend": legend,
    }
