"""Boxes, arrows and text as SVG, for the pictures of the docs.

Text is not measured, so the same code gives the same bytes everywhere. The background is white, because a page may be
dark.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from xml.sax.saxutils import escape

FONT = "Verdana, 'DejaVu Sans', Arial, Helvetica, sans-serif"
INK, FAINT, GRADIENT, ACK, BAD = "#1f2933", "#7b8794", "#c2410c", "#1d4ed8", "#b91c1c"
FILLS = {
    "op": ("#f4f5f7", "#616e7c"),
    "leaf": ("#d9f2e0", "#2f7d4f"),
    "token": ("#dbe8fd", "#1d4ed8"),
    "recv": ("#eadcfb", "#6d28d9"),
    "gate": ("#fdeac4", "#b7791f"),
    "root": ("#fde0d3", "#c2410c"),
    "dead": ("#ffffff", "#b8c2cc"),
}


@dataclass(frozen=True)
class Box:
    """A rectangle that arrows can start from and end at."""

    x: float
    y: float
    width: float
    height: float

    def border_towards(self, x: float, y: float) -> tuple[float, float]:
        """Return where a line from the center to a point crosses the border."""
        dx, dy = x - self.x, y - self.y
        if not dx and not dy:
            return self.x, self.y
        reach = min(
            self.width / 2 / abs(dx) if dx else math.inf,
            self.height / 2 / abs(dy) if dy else math.inf,
        )
        return self.x + dx * reach, self.y + dy * reach


@dataclass
class Picture:
    """Shapes on a white background. Positions are those of their centers unless noted."""

    width: int
    height: int
    about: str
    _parts: list[str] = field(default_factory=list)

    def text(
        self,
        x: float,
        y: float,
        words: str,
        *,
        size: float = 12,
        ink: str = INK,
        bold: bool = False,
        at: str = "middle",
    ) -> None:
        """Add one line of text; `y` is its baseline."""
        weight = ' font-weight="bold"' if bold else ""
        self._parts.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size:g}" fill="{ink}" text-anchor="{at}"{weight}>'
            f"{escape(words)}</text>"
        )

    def lines(self, x: float, y: float, words: Sequence[str], *, size: float = 12, ink: str = INK) -> None:
        """Add left-aligned lines of text below each other."""
        for number, line in enumerate(words):
            self.text(x, y + number * size * 1.5, line, size=size, ink=ink, at="start")

    def area(self, x: float, y: float, width: float, height: float, name: str, *, dashed: bool = False) -> None:
        """Add a worker, or an island in it, given by its upper left corner."""
        look = (
            f'fill="none" stroke="{GRADIENT}" stroke-dasharray="6 4"' if dashed else 'fill="#fbfcfd" stroke="#9aa5b1"'
        )
        self._parts.append(f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="10" {look}/>')
        self.text(x + 12, y + 19, name, size=12, ink=GRADIENT if dashed else INK, bold=not dashed, at="start")

    def node(self, x: float, y: float, words: str, kind: str = "op", *, width: float = 0) -> Box:
        """Add a node of a graph."""
        box = Box(x, y, width or 18 + 7.6 * len(words), 28)
        fill, stroke = FILLS[kind]
        dash = ' stroke-dasharray="4 3"' if kind == "dead" else ""
        self._parts.append(
            f'<rect x="{x - box.width / 2:g}" y="{y - 14:g}" width="{box.width:g}" height="28" rx="6" fill="{fill}" '
            f'stroke="{stroke}"{dash}/>'
        )
        self.text(x, y + 4, words, ink=FAINT if kind == "dead" else INK)
        return box

    def line(self, *points: tuple[float, float], ink: str = INK, thick: float = 1.4, dash: str = "") -> None:
        """Add an arrow along these points."""
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        dashes = f' stroke-dasharray="{dash}"' if dash else ""
        self._parts.append(
            f'<polyline points="{path}" fill="none" stroke="{ink}" stroke-width="{thick:g}"{dashes} '
            f'marker-end="url(#tip{ink[1:]})"/>'
        )

    def stroke(self, *points: tuple[float, float], ink: str = INK, thick: float = 1.4, dash: str = "") -> None:
        """Add a line along these points, without an arrowhead."""
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        dashes = f' stroke-dasharray="{dash}"' if dash else ""
        self._parts.append(f'<polyline points="{path}" fill="none" stroke="{ink}" stroke-width="{thick:g}"{dashes}/>')

    def block(self, x: float, y: float, width: float, height: float, fill: str) -> None:
        """Add a filled rectangle, given by its upper left corner."""
        self._parts.append(f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{fill}"/>')

    def dot(self, x: float, y: float, ink: str) -> None:
        """Add a data point."""
        self._parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{ink}"/>')

    def edge(self, start: Box, end: Box, *, ink: str = INK, dash: str = "", thick: float = 1.4) -> None:
        """Add an arrow from one node to another."""
        self.line(
            start.border_towards(end.x, end.y), end.border_towards(start.x, start.y), ink=ink, dash=dash, thick=thick
        )

    def bar(self, x: float, top: float, bottom: float, fill: str = "#fde0d3", *, ink: str = GRADIENT) -> None:
        """Add a period of activity of a worker, in a picture where time runs downwards."""
        self._parts.append(
            f'<rect x="{x - 7:g}" y="{top:g}" width="14" height="{bottom - top:g}" fill="{fill}" stroke="{ink}"/>'
        )

    def lifeline(self, x: float, name: str, bottom: float) -> None:
        """Add a worker, in a picture where time runs downwards."""
        self._parts.append(f'<line x1="{x:g}" y1="58" x2="{x:g}" y2="{bottom:g}" stroke="#cbd2d9"/>')
        self.node(x, 44, name, width=110)

    def svg(self) -> str:
        """Return the whole file."""
        tips = "".join(
            f'<marker id="tip{ink[1:]}" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" '
            f'orient="auto"><path d="M0,0 L10,5 L0,10 z" fill="{ink}"/></marker>'
            for ink in (INK, FAINT, GRADIENT, ACK, BAD)
        )
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" width="{self.width}" '
            f'height="{self.height}" font-family="{FONT}" role="img">\n<title>{escape(self.about)}</title>\n'
            f'<defs>{tips}</defs>\n<rect width="{self.width}" height="{self.height}" fill="#ffffff"/>'
        )
        return "\n".join([head, *self._parts, "</svg>\n"])
