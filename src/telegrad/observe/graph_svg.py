"""Draws the graph of a context as an SVG picture. The same graph gives the same bytes."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from telegrad.observe.graph import ContextGraph, GraphEdge, GraphNode
from telegrad.observe.graph_layout import Layout, Place, arrange
from telegrad.observe.printable import escape_xml

FONT = "Verdana, 'DejaVu Sans', Arial, Helvetica, sans-serif"
KINDS = {
    "root": ("#fde0d3", "#c2410c", "roots of the pass"),
    "op": ("#f4f5f7", "#616e7c", "operation"),
    "leaf": ("#d9f2e0", "#2f7d4f", "leaf: gets a gradient"),
    "send": ("#dbe8fd", "#1d4ed8", "send: gradients enter here"),
    "recv": ("#eadcfb", "#6d28d9", "recv: gradients leave here"),
    "group": ("#e4e7eb", "#3e4c59", "several, folded"),
    "more": ("#ffffff", "#9aa5b1", ""),
}
"""Fill, border and what the legend says."""
STATES = {
    "waits": ("#b7791f", "5 3", "waits for gradients"),
    "runs": ("#e8590c", "", "runs now"),
    "done": ("#2f7d4f", "", "done"),
    "skipped": ("#b8c2cc", "2 3", "not reached by this pass"),
}
"""Border, dashes and what the legend says, in a pass."""
NODE_HEIGHT, ROW, COLUMN_GAP, LANE_HEAD, LANE_GAP, MARGIN = 26, 38, 36, 30, 18, 18
_TOP = 54
_INK, _FAINT, _EDGE, _MESSAGE = "#1f2933", "#7b8794", "#c2410c", "#1f2933"
_LONGEST = 26  # letters


class Geometry(msgspec.Struct, frozen=True):
    """Sizes and positions in a picture."""

    layout: Layout
    widths: dict[str, float]
    lefts: list[float]
    """Of each column."""
    column_widths: list[float]
    width: float

    def center(self, place: Place) -> float:
        """Return the horizontal center of a place."""
        return self.lefts[place.column] + self.column_widths[place.column] / 2


def geometry(graph: ContextGraph) -> Geometry:
    """Arrange a graph, and return what is where."""
    layout = arrange(graph)
    widths = {node.key: node_width(node) for node in graph.nodes}
    columns = [0.0] * layout.columns
    for key, place in layout.nodes.items():
        columns[place.column] = max(columns[place.column], widths[key])
    lefts, left = [], MARGIN + 14.0
    for width in columns:
        lefts.append(left)
        left += width + COLUMN_GAP
    return Geometry(layout, widths, lefts, columns, max(left - COLUMN_GAP + MARGIN + 14, 620.0))


def shown_name(node: GraphNode) -> str:
    """Return the name of a node, cut if it is long."""
    return node.name if len(node.name) <= _LONGEST else node.name[: _LONGEST - 1] + "…"


def node_width(node: GraphNode) -> float:
    """Return the width of a node's box. Text is not measured."""
    return 20 + 7.3 * len(shown_name(node))


def render_graph(graph: ContextGraph) -> str:
    """Return a picture of a graph."""
    shape = geometry(graph)
    tops, top = [], float(_TOP)
    for rows in shape.layout.rows:
        tops.append(top)
        top += LANE_HEAD + rows * ROW + LANE_GAP
    parts: list[str] = []
    for worker, lane_top, rows in zip(graph.workers, tops, shape.layout.rows, strict=True):
        height = LANE_HEAD + rows * ROW
        parts.append(
            f'<rect x="{MARGIN}" y="{lane_top:g}" width="{shape.width - 2 * MARGIN:g}" height="{height}" rx="8" '
            'fill="#fbfcfd" stroke="#cbd2d9"/>'
        )
        parts.append(_text(MARGIN + 12, lane_top + 19, worker, size=12, bold=True))
        if worker in graph.silent:
            x = MARGIN + 24 + 8 * len(worker)
            parts.append(_text(x, lane_top + 19, f"did not answer: {graph.silent[worker]}", size=11, ink="#b91c1c"))
    for edge, bends in zip(graph.edges, shape.layout.bends, strict=True):
        parts += _edge(shape, tops, edge, bends)
    for node in graph.nodes:
        parts += _node(shape, tops, node)
    states = [state for state in STATES if any(node.state == state for node in graph.nodes)]
    kinds = [kind for kind in KINDS if any(node.kind == kind for node in graph.nodes)]
    legend, height_of_legend = _legend(shape.width, top + 8, kinds, states)
    height = round(top + 8 + height_of_legend)
    title = f"Context {graph.context:#x}: the way of gradients, from left to right"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {shape.width:.0f} {height}" '
            f'width="{shape.width:.0f}" height="{height}" font-family="{FONT}" role="img">',
            f"<title>{escape_xml(title)}</title>",
            f"<defs>{_tip('edge', _EDGE)}{_tip('message', _MESSAGE)}</defs>",
            f'<rect width="{shape.width:.0f}" height="{height}" fill="#ffffff"/>',
            _text(MARGIN, 24, f"Context {graph.context:#x}", size=14, bold=True),
            _text(MARGIN, 42, "Gradients flow from left to right; dashed arrows are messages.", size=11, ink=_FAINT),
            *parts,
            *legend,
            "</svg>\n",
        ]
    )


def _middle(tops: Sequence[float], place: Place) -> float:
    return tops[place.lane] + LANE_HEAD + place.row * ROW + (ROW - 8) / 2


def _node(shape: Geometry, tops: Sequence[float], node: GraphNode) -> list[str]:
    place, width = shape.layout.nodes[node.key], shape.widths[node.key]
    x, y = shape.center(place), _middle(tops, place)
    fill, border, _ = KINDS[node.kind]
    dashes, thick = "", 1.0
    if node.state:
        border, dash, _ = STATES[node.state]
        dashes, thick = f' stroke-dasharray="{dash}"' if dash else "", 2.2 if node.state == "runs" else 1.6
    faint = node.state == "skipped"
    about = escape_xml("\n".join([node.name, *node.details, *([f"in this pass: {node.state}"] if node.state else [])]))
    return [
        f'<g><title>{about}</title><rect x="{x - width / 2:.1f}" y="{y - NODE_HEIGHT / 2:.1f}" width="{width:.1f}" '
        f'height="{NODE_HEIGHT}" rx="6" fill="{"#ffffff" if faint else fill}" stroke="{border}" '
        f'stroke-width="{thick}"{dashes}/>'
        + _text(x, y + 4, shown_name(node), size=11.5, ink=_FAINT if faint else _INK, at="middle")
        + "</g>"
    ]


def _edge(shape: Geometry, tops: Sequence[float], edge: GraphEdge, bends: list[Place]) -> list[str]:
    source, target = shape.layout.nodes[edge.source], shape.layout.nodes[edge.target]
    x = shape.center(source) + shape.widths[edge.source] / 2
    y = _middle(tops, source)
    path = [f"M{x:.1f},{y:.1f}"]
    for bend in bends:
        left, right = shape.lefts[bend.column], shape.lefts[bend.column] + shape.column_widths[bend.column]
        path.append(curve(x, y, left, _middle(tops, bend)) + f" L{right:.1f},{_middle(tops, bend):.1f}")
        x, y = right, _middle(tops, bend)
    path.append(curve(x, y, shape.center(target) - shape.widths[edge.target] / 2 - 2, _middle(tops, target)))
    message = source.lane != target.lane or edge.message
    look = f'stroke="{_MESSAGE}" stroke-width="1.8" stroke-dasharray="6 4"' if message else f'stroke="{_EDGE}"'
    tip = "message" if message else "edge"
    about = escape_xml(f"{edge.message}: {', '.join(edge.shapes)}") if edge.message else ""
    hover = f"<title>{about}</title>" if about else ""
    return [f'<g>{hover}<path d="{"".join(path)}" fill="none" {look} marker-end="url(#{tip})"/></g>']


def curve(x: float, y: float, end_x: float, end_y: float) -> str:
    """Return a curve that begins and ends horizontally."""
    pull = max(abs(end_x - x) / 2, 18.0)
    return f" C{x + pull:.1f},{y:.1f} {end_x - pull:.1f},{end_y:.1f} {end_x:.1f},{end_y:.1f}"


def _legend(width: float, top: float, kinds: list[str], states: list[str]) -> tuple[list[str], float]:
    parts, x, y = [], float(MARGIN), top
    entries = [(*KINDS[kind], 1.0, "") for kind in kinds if KINDS[kind][2]]
    entries += [("#ffffff", *STATES[state][::2], 1.8, STATES[state][1]) for state in states]
    for fill, border, words, thick, dash in entries:
        length = 40 + 6.8 * len(words)
        if x + length > width - MARGIN:
            x, y = float(MARGIN), y + 22
        parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="18" height="13" rx="3" fill="{fill}" stroke="{border}" '
            f'stroke-width="{thick}"{f" stroke-dasharray={chr(34)}{dash}{chr(34)}" if dash else ""}/>'
        )
        parts.append(_text(x + 24, y + 11, words, size=11))
        x += length
    return parts, y - top + 28


def _tip(name: str, ink: str) -> str:
    return (
        f'<marker id="{name}" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="8" markerHeight="8" '
        f'markerUnits="userSpaceOnUse" orient="auto"><path d="M0,0 L10,5 L0,10 z" fill="{ink}"/></marker>'
    )


def _text(
    x: float, y: float, words: str, *, size: float, ink: str = _INK, bold: bool = False, at: str = "start"
) -> str:
    weight = ' font-weight="bold"' if bold else ""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size:g}" fill="{ink}" text-anchor="{at}"{weight}>'
        f"{escape_xml(words)}</text>"
    )
