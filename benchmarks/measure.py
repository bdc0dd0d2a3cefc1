"""What makes a comparison of two systems fair, and its figures readable, is the same for every benchmark here.

A shared machine drifts: a neighbour starts a job, a core changes its clock. So no system is measured before the other.
They take turns in short blocks, each time in the opposite order, and a ratio is always that of figures from the
same minutes. How far the ratios of single pairs of blocks lie apart tells how much to trust the ratio of all.
"""

from __future__ import annotations

import json
import math
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

Block = list[float]
"""The seconds that each iteration of one block took."""


def time_each(action: Callable[[], object], iterations: int) -> Block:
    """Run `action` several times, and return how long each took. What it returns is dropped inside its time."""
    clock = time.perf_counter
    seconds = []
    for _ in range(iterations):
        begin = clock()
        action()
        seconds.append(clock() - begin)
    return seconds


def time_inside(scene: Callable[[], AbstractContextManager[Callable[[], object]]], iterations: int) -> Block:
    """Like `time_each`, with a scene set for every run and cleared after it, outside its time."""
    clock = time.perf_counter
    seconds = []
    for _ in range(iterations):
        with scene() as action:
            begin = clock()
            action()
            seconds.append(clock() - begin)
    return seconds


@dataclass(frozen=True)
class Series:
    """All blocks of one system in one case."""

    blocks: tuple[Block, ...]

    def count(self) -> int:
        """How many iterations there were."""
        return sum(len(block) for block in self.blocks)

    def median(self) -> float:
        """The median over all iterations, in seconds."""
        return statistics.median(self._all())

    def percentile(self, percent: float) -> float:
        """The smallest time that is not exceeded by `percent` of all: of less than a hundred, the 99th is the worst.

        >>> Series(([3.0, 1.0], [2.0, 4.0])).percentile(50)
        2.0
        """
        ordered = sorted(self._all())
        return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]

    def _all(self) -> list[float]:
        return [seconds for block in self.blocks for seconds in block]


def alternate(systems: Mapping[str, Callable[[], Block]], blocks: int) -> dict[str, Series]:
    """Let the systems run one block each in turn, the order reversed every time; the first turn is a warm-up.

    >>> turns = []
    >>> runs = {name: lambda name=name: turns.append(name) or [1.0] for name in "ab"}
    >>> alternate(runs, 2)["a"].count()
    2
    >>> "".join(turns)
    'ababba'
    """
    for run in systems.values():
        run()
    measured: dict[str, list[Block]] = {name: [] for name in systems}
    order = list(systems)
    for _ in range(blocks):
        for name in order:
            measured[name].append(systems[name]())
        order.reverse()
    return {name: Series(tuple(taken)) for name, taken in measured.items()}


@dataclass(frozen=True)
class Comparison:
    """One case, measured on the system that is there and on the one that shall be better."""

    case: str
    what: str
    baseline: Series
    candidate: Series

    def ratio(self) -> float:
        """The candidate's median over the baseline's: below 1, the candidate is faster."""
        return self.candidate.median() / self.baseline.median()

    def pair_ratios(self) -> list[float]:
        """The ratio of medians of each pair of neighbouring blocks."""
        return [
            statistics.median(ours) / statistics.median(theirs)
            for ours, theirs in zip(self.candidate.blocks, self.baseline.blocks, strict=True)
        ]


@dataclass(frozen=True)
class Report:
    """All that one run has found."""

    baseline: str
    candidate: str
    settings: Mapping[str, Any]
    comparisons: Sequence[Comparison]
    alone: Mapping[str, Series]
    """What was measured with nothing to compare it to, as information."""
    machine: Mapping[str, Any]

    def text(self) -> str:
        """The report as a plain table."""
        lines = [f"{name:9} {value}" for name, value in {**self.machine, **self.settings}.items()]
        head = ["case", self.baseline, "p99", self.candidate, "p99", "ratio", "of block pairs", "n", "what"]
        rows = [self._row(comparison) for comparison in self.comparisons]
        lines += ["", *columns([head, *rows], left=(0, len(head) - 1)), ""]
        lines += [
            f"{name}: median {_microseconds(series.median())}, p99 {_microseconds(series.percentile(99))}"
            for name, series in self.alone.items()
        ]
        lines.append(
            f"Times in µs, medians over n iterations. Ratio: {self.candidate} / {self.baseline}; less is faster."
        )
        return "\n".join(lines)

    def _row(self, comparison: Comparison) -> list[str]:
        pairs = comparison.pair_ratios()
        return [
            comparison.case,
            *(_microseconds(seconds) for seconds in _median_and_p99(comparison.baseline)),
            *(_microseconds(seconds) for seconds in _median_and_p99(comparison.candidate)),
            f"{comparison.ratio():.2f}",
            f"{min(pairs):.2f} to {max(pairs):.2f}",
            str(comparison.candidate.count()),
            comparison.what,
        ]

    def write_json(self, path: Path) -> None:
        """Write everything, down to the single iterations, in seconds."""
        content = {
            "machine": dict(self.machine),
            "settings": dict(self.settings),
            "cases": {
                comparison.case: {
                    "what": comparison.what,
                    self.baseline: _as_data(comparison.baseline),
                    self.candidate: _as_data(comparison.candidate),
                    "ratio": comparison.ratio(),
                    "pair_ratios": comparison.pair_ratios(),
                }
                for comparison in self.comparisons
            },
            "alone": {name: _as_data(series) for name, series in self.alone.items()},
        }
        path.write_text(json.dumps(content, indent=1) + "\n")


def columns(rows: Sequence[Sequence[str]], left: Sequence[int] = (0,)) -> list[str]:
    """Lines in which the cells of each column stand below each other: to the right, but for the columns in `left`."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return lines


def machine() -> dict[str, Any]:
    """What the figures depend on besides the code. The load tells whether the machine was ours."""
    return {
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": version("torch"),
        "telegrad": version("telegrad"),
        "load": " ".join(f"{load:.1f}" for load in os.getloadavg()),
    }


def _median_and_p99(series: Series) -> tuple[float, float]:
    return series.median(), series.percentile(99)


def _as_data(series: Series) -> dict[str, Any]:
    median, p99 = _median_and_p99(series)
    return {"median": median, "p99": p99, "count": series.count(), "blocks": series.blocks}


def _microseconds(seconds: float) -> str:
    return f"{seconds * 1e6:,.0f}"
