"""Draws the figures of `scaling.py`: what a worker costs in groups of 100 to 10,000.

    python benchmarks/draw_scaling.py [--json FILE] [--picture FILE]

The picture depends only on the figures: a test compares the committed picture with the committed figures.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FIGURES = ROOT / "benchmarks" / "results" / "scaling.json"
PICTURE = ROOT / "docs" / "scaling.svg"
sys.path.append(str(ROOT / "docs"))

from drawing import ACK, BAD, FAINT, GRADIENT, INK, Picture  # noqa: E402 - after its folder is on sys.path

GRID, GREEN = "#e4e7eb", "#2f7d4f"
WIDTH, HEIGHT = 860, 440
MOST = 3.0
"""How much more a worker may cost in the largest group than in the smallest, to start and to leave."""
Points = list[tuple[int, float]]
Lines = dict[str, tuple[Points, str, str]]
"""By name: the figures by size of the group, colour, and dashes."""


def lines_of(figures: Mapping[str, Any]) -> tuple[Lines, Lines]:
    """Return the lines of the two charts: times and counts."""

    def points(table: str, name: str, group: str = "simulated") -> Points:
        return [(int(count), found[name]) for count, found in figures[group][table].items()]

    times = {
        "start": (points("init", "CPU ms"), GRADIENT, ""),
        "shutdown": (points("departures", "CPU ms"), ACK, ""),
        "start, when each decoded the whole list": (points("init", "CPU ms", "before"), FAINT, "5 4"),
    }
    counts = {
        "shutdown: messages": (points("rules", "shutdown, messages"), ACK, ""),
        "shutdown: messages one after the other": (points("rules", "shutdown, steps"), INK, "2 3"),
        "start: operations at the store": (points("rendezvous", "store operations"), GRADIENT, ""),
        "barrier: messages": (points("rules", "barrier, messages"), GREEN, ""),
    }
    return times, counts


def ratio(points: Points) -> float:
    """Return how much more it is in the largest group than in the smallest.

    >>> ratio([(100, 2.0), (1000, 2.5), (10000, 5.0)])
    2.5
    """
    return max(points)[1] / min(points)[1]


def draw(figures: Mapping[str, Any]) -> Picture:
    """Return the picture of these figures."""
    picture = Picture(WIDTH, HEIGHT, "The cost of one worker in groups of 100 to 10,000 simulated workers")
    picture.text(20, 28, "The cost of one worker, by the size of its group", size=15, bold=True, at="start")
    picture.text(20, 46, "simulated workers; all axes are logarithmic", size=11, ink=FAINT, at="start")
    times, counts = lines_of(figures)
    _chart(picture, 56, "CPU time, ms", times, 1000)
    _chart(picture, 480, "How many", counts, 100)
    words, missed = [], False
    for name in ("start", "shutdown"):
        grown = ratio(times[name][0])
        words.append(f"{name} {grown:.1f} times at {max(times[name][0])[0]:,}")
        missed = missed or round(grown, 1) > MOST
    summary = f"CPU time in the largest group against the smallest: {', '.join(words)}; at most {MOST:g}"
    picture.text(20, HEIGHT - 16, summary, size=11, ink=BAD if missed else INK, at="start")
    return picture


def _chart(picture: Picture, left: float, title: str, lines: Lines, most: float) -> None:
    top, width, height = 92.0, 330.0, 200.0
    sizes = sorted({size for points, _, _ in lines.values() for size, _ in points})
    across = _logarithmic(sizes[0], sizes[-1], left, left + width)
    up = _logarithmic(1, most, top + height, top)
    picture.text(left, top - 14, title, size=12, bold=True, at="start")
    for power in range(round(math.log10(most)) + 1):
        y = up(10.0**power)
        picture.stroke((left, y), (left + width, y), ink=GRID, thick=1)
        picture.text(left - 6, y + 4, f"{10**power:,}", size=11, ink=FAINT, at="end")
    for size in sizes:
        picture.text(across(size), top + height + 18, f"{size:,}", size=11, ink=FAINT)
    for number, (name, (points, ink, dash)) in enumerate(lines.items()):
        picture.stroke(*((across(size), up(value)) for size, value in points), ink=ink, thick=2, dash=dash)
        for size, value in points:
            picture.dot(across(size), up(value), ink)
        y = top + height + 46 + 18 * number
        picture.stroke((left, y), (left + 24, y), ink=ink, thick=2, dash=dash)
        ends = f"{_short(points[0][1])} to {_short(points[-1][1])}"
        picture.text(left + 32, y + 4, f"{name}: {ends}", size=11, at="start")


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 or value == int(value) else f"{value:.1f}"


def _logarithmic(low: float, high: float, start: float, end: float) -> Callable[[float], float]:
    return lambda value: start + (end - start) * math.log(value / low) / math.log(high / low)


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw the picture as a command."""
    parser = argparse.ArgumentParser(description="Draw the figures that scaling.py has written.")
    parser.add_argument("--json", type=Path, default=FIGURES, metavar="FILE", help="the figures (%(default)s)")
    parser.add_argument("--picture", type=Path, default=PICTURE, metavar="FILE", help="the picture (%(default)s)")
    options = parser.parse_args(arguments)
    options.picture.write_text(draw(json.loads(options.json.read_text())).svg())
    return 0


if __name__ == "__main__":
    sys.exit(main())
