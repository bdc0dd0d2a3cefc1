"""Draws how costs grow with the calls of a context, the tensors of a message, and the workers of a group.

    python benchmarks/draw_growth.py [--json FILE] [--workers-json FILE] [--picture FILE]

The figures are those of `growth.py --json` and `growth_workers.py --json`.

The picture depends only on the figures: a test compares the committed picture with the committed figures.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draw import GRID, ROOT, logarithmic
from drawing import ACK, BAD, FAINT, GRADIENT, INK, Picture

FIGURES = ROOT / "benchmarks" / "results" / "growth.json"
WORKERS = ROOT / "benchmarks" / "results" / "growth_workers.json"
PICTURE = ROOT / "docs" / "growth.svg"
WIDTH, PLOT_WIDTH, PLOT_HEIGHT = 860, 340.0, 170.0
INKS = (GRADIENT, ACK, INK, FAINT)

Lines = Mapping[str, Mapping[int, float]]
"""Figures by size, by name."""


@dataclass(frozen=True)
class Plot:
    """One of the four plots."""

    title: str
    across: str
    """What the sizes are."""
    unit: str
    lines: Lines
    is_logarithmic: bool = False
    """Whether the vertical axis is."""
    compared: bool = False
    """Whether dashed lines show what grows as much as the sizes do."""


def draw(growth: Mapping[str, Any], figures: Mapping[str, Any]) -> Picture:
    """Draw the whole picture, from the figures of `growth.py` and of `growth_workers.py`."""
    lines = {name: line for name, line in growth.items() if all(size.isdecimal() for size in line)}
    tensors = {name: line for name, line in lines.items() if name.startswith("message")}
    calls = {name: line for name, line in lines.items() if name not in tensors}
    by_workers = _lines(figures["workers"])
    times = {name: line for name, line in by_workers.items() if "MB" not in name}
    milliseconds = {name: {size: 1e3 * each for size, each in line.items()} for name, line in times.items()}
    memory = {name: line for name, line in by_workers.items() if "MB" in name}
    plots = [
        Plot("CPU time of a pass, for each call", "calls in the context", "µs", _lines(calls)),
        Plot(
            "CPU time of a message, for each tensor",
            "tensors in the message",
            "µs",
            _lines(tensors),
            is_logarithmic=True,
        ),
        Plot(
            "Time of the slowest worker",
            "workers, on one machine",
            "ms",
            milliseconds,
            is_logarithmic=True,
            compared=True,
        ),
        Plot("Private memory of a worker", "workers, on one machine", "MB", memory),
    ]
    notes = _notes(figures)
    bottom = 40 + 310 * math.ceil(len(plots) / 2)
    picture = Picture(WIDTH, bottom + 17 * len(notes) + 10, "How costs grow with calls, tensors and workers")
    picture.text(20, 26, "How costs grow", size=15, bold=True, at="start")
    for number, plot in enumerate(plots):
        _plot(picture, plot, 64 + 425 * (number % 2), 76 + 310 * (number // 2))
    for number, (words, ink) in enumerate(notes):
        picture.text(20, bottom + 12 + 17 * number, words, size=11, ink=ink, at="start")
    return picture


def _lines(figures: Mapping[str, Mapping[str, float]]) -> dict[str, dict[int, float]]:
    """Return figures with numbers as sizes, which are texts in JSON."""
    return {name: {int(size): value for size, value in line.items()} for name, line in figures.items()}


def _plot(picture: Picture, plot: Plot, left: float, top: float) -> None:
    sizes = sorted({size for line in plot.lines.values() for size in line})
    values = [value for line in plot.lines.values() for value in line.values()]
    bottom, right = top + PLOT_HEIGHT, left + PLOT_WIDTH
    across = logarithmic(sizes[0], sizes[-1], left, right)
    if plot.is_logarithmic:
        marks = _powers(min(values), max(values))
        up = logarithmic(marks[0], marks[-1], bottom, top)
    else:
        marks = _steps(max(values))
        most = marks[-1]

        def up(value: float) -> float:
            return bottom - (bottom - top) * value / most

    picture.text(left, top - 12, plot.title, size=12, bold=True, at="start")
    for mark in marks:
        picture.stroke((left, up(mark)), (right, up(mark)), ink=GRID, thick=1)
        picture.text(left - 6, up(mark) + 4, f"{mark:,g} {plot.unit}", size=10, ink=FAINT, at="end")
    for size in sizes:
        picture.text(across(size), bottom + 15, f"{size:,}", size=10, ink=FAINT)
    picture.text((left + right) / 2, bottom + 30, plot.across, size=10, ink=FAINT)
    if plot.compared:
        _proportional(picture, plot.lines, (across, up), marks[-1])
    for number, (name, line) in enumerate(plot.lines.items()):
        ink = INKS[number % len(INKS)]
        points = [(across(size), up(value)) for size, value in sorted(line.items())]
        picture.stroke(*points, ink=ink, thick=2)
        for x, y in points:
            picture.dot(x, y, ink)
        y = bottom + 48 + 15 * number
        picture.stroke((left, y - 4), (left + 18, y - 4), ink=ink, thick=2)
        picture.text(left + 24, y, f"{name}: {_growth(line, plot)}", size=11, at="start")


def _proportional(picture: Picture, lines: Lines, axes: tuple[Any, Any], most: float) -> None:
    """Add a line for each one that grows as much as the sizes do, from its first point on."""
    across, up = axes
    for line in lines.values():
        first, last = min(line), max(line)
        end = min(last, most / line[first] * first)
        picture.stroke(
            (across(first), up(line[first])), (across(end), up(line[first] * end / first)), ink=FAINT, dash="5 4"
        )


def _growth(line: Mapping[int, float], plot: Plot) -> str:
    first, last = line[min(line)], line[max(line)]
    if plot.compared:
        return f"{last / first:.1f} times for {max(line) / min(line):g} times as many"
    return f"{first:,.0f} to {last:,.0f} {plot.unit}"


def _powers(low: float, high: float) -> list[float]:
    return [10.0**power for power in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)]


def _steps(most: float) -> list[float]:
    """Return round numbers from 0 to more than `most`.

    >>> _steps(733.0), _steps(21.5)
    ([0.0, 200.0, 400.0, 600.0, 800.0], [0.0, 5.0, 10.0, 15.0, 20.0, 25.0])
    """
    power = 10.0 ** math.floor(math.log10(most))
    step = next(power * part for part in (0.1, 0.2, 0.5, 1, 2) if most / (power * part) <= 5)
    return [step * number for number in range(math.ceil(most / step) + 1)]


def _notes(figures: Mapping[str, Any]) -> list[tuple[str, str]]:
    machine = figures["machine"]
    versions = ", ".join(f"{name} {machine[name]}" for name in ("python", "torch", "telegrad"))
    notes = [
        ("Above, a flat line means that the cost of all is linear.", FAINT),
        ("Below, the workers share the cores of one machine. Dashed: as many times as there are workers.", FAINT),
    ]
    notes.append((f"An idle link takes {figures['link bytes'] / 1024:.1f} KB of Python's memory.", FAINT))
    notes.append((f"{machine['processor']}, {machine['cores']} cores, {machine['memory']}; {versions}", FAINT))
    load = float(machine["load"].split()[0])
    if load > machine["cores"] / 2:
        notes.append((f"The machine was busy before the run began (load {load:g}): do not rely on times.", BAD))
    return notes


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw the picture as a command."""
    parser = argparse.ArgumentParser(description="Draw the figures of growth.py and growth_workers.py.")
    parser.add_argument("--json", type=Path, default=FIGURES, metavar="FILE", help="the figures (%(default)s)")
    parser.add_argument("--workers-json", type=Path, default=WORKERS, metavar="FILE", help="(%(default)s)")
    parser.add_argument("--picture", type=Path, default=PICTURE, metavar="FILE", help="the picture (%(default)s)")
    options = parser.parse_args(arguments)
    found = [json.loads(path.read_text()) for path in (options.json, options.workers_json)]
    options.picture.write_text(draw(*found).svg())
    return 0


if __name__ == "__main__":
    sys.exit(main())
