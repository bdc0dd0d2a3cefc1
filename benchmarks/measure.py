"""Fair comparisons of two systems, and reports, for all benchmarks.

A shared machine drifts: a neighbour starts a job, a core changes its clock. So the systems take turns in short blocks,
reversing the order each time, and ratios compare figures from the same minutes. The spread of the ratios of single
block pairs shows how far to trust the overall ratio.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

Block = list[float]
"""The seconds that each iteration of one block took."""


def time_each(action: Callable[[], object], iterations: int) -> Block:
    """Run `action` several times, and return the time of each run. The time includes freeing its result."""
    clock = time.perf_counter
    seconds = []
    for _ in range(iterations):
        begin = clock()
        action()
        seconds.append(clock() - begin)
    return seconds


def time_inside(setup: Callable[[], AbstractContextManager[Callable[[], object]]], iterations: int) -> Block:
    """Like `time_each`, with an untimed setup and teardown around every run."""
    clock = time.perf_counter
    seconds = []
    for _ in range(iterations):
        with setup() as action:
            begin = clock()
            action()
            seconds.append(clock() - begin)
    return seconds


@dataclass(frozen=True)
class Series:
    """All blocks of one system in one case."""

    blocks: tuple[Block, ...]

    def followed_by(self, later: Series) -> Series:
        """Return these blocks followed by the later ones."""
        return Series(self.blocks + later.blocks)

    def count(self) -> int:
        """Return the number of iterations."""
        return sum(len(block) for block in self.blocks)

    def median(self) -> float:
        """Return the median over all iterations, in seconds."""
        return statistics.median(self._all())

    def percentile(self, percent: float) -> float:
        """Return the smallest time that `percent` of all do not exceed. Below 100 samples, the 99th is the maximum.

        >>> Series(([3.0, 1.0], [2.0, 4.0])).percentile(50)
        2.0
        """
        ordered = sorted(self._all())
        return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]

    def _all(self) -> list[float]:
        return [seconds for block in self.blocks for seconds in block]


def alternate(systems: Mapping[str, Callable[[], Block]], blocks: int) -> dict[str, Series]:
    """Let the systems take turns with one block each, reversing the order every time, after a warm-up turn.

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
    """One case, measured on the baseline and on the candidate."""

    case: str
    what: str
    baseline: Series
    candidate: Series
    beside: Mapping[str, Series] = field(default_factory=dict)
    """Other series: other systems, or a lower bound of the cost."""
    targets: Mapping[str, float] = field(default_factory=dict)
    """The largest allowed ratio of the candidate's time to that of a system, by system."""

    def ratio(self) -> float:
        """Return the candidate's median over the baseline's. Below 1 the candidate is faster."""
        return self.ratio_to(self.baseline)

    def ratio_to(self, other: Series) -> float:
        """Return the candidate's median over that of another series."""
        return self.candidate.median() / other.median()

    def pair_ratios(self) -> list[float]:
        """Return the ratio of medians for each pair of adjacent blocks."""
        return [
            statistics.median(ours) / statistics.median(theirs)
            for ours, theirs in zip(self.candidate.blocks, self.baseline.blocks, strict=True)
        ]


@dataclass(frozen=True)
class Report:
    """The results of one run."""

    baseline: str
    candidate: str
    settings: Mapping[str, Any]
    comparisons: Sequence[Comparison]
    machine: Mapping[str, Any]

    def text(self) -> str:
        """Return the report as plain tables."""
        lines = [f"{name:9} {value}" for name, value in {**self.machine, **self.settings}.items()]
        head = ["case", self.baseline, "p99", self.candidate, "p99", "ratio", "at most", "met", "of block pairs", "n"]
        rows = [self._row(comparison) for comparison in self.comparisons]
        lines += ["", *columns([[*head, "what"], *rows], left=(0, len(head))), ""]
        if others := [row for comparison in self.comparisons for row in self._rows_beside(comparison)]:
            head = ["case", "beside", "median", "p99", f"{self.candidate} / it", "at most", "met"]
            lines += [*columns([head, *others], left=(0, 1)), ""]
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
            *_with_target(comparison.ratio(), comparison.targets.get(self.baseline)),
            f"{min(pairs):.2f} to {max(pairs):.2f}",
            str(comparison.candidate.count()),
            comparison.what,
        ]

    def _rows_beside(self, comparison: Comparison) -> list[list[str]]:
        return [
            [
                comparison.case,
                name,
                *(_microseconds(seconds) for seconds in _median_and_p99(series)),
                *_with_target(comparison.ratio_to(series), comparison.targets.get(name)),
            ]
            for name, series in comparison.beside.items()
        ]

    def as_data(self, *, blocks: bool = True) -> dict[str, Any]:
        """Return all results in seconds, with `blocks` down to single iterations."""
        return {
            "machine": dict(self.machine),
            "settings": dict(self.settings),
            "cases": {comparison.case: self._case_as_data(comparison, blocks) for comparison in self.comparisons},
        }

    def _case_as_data(self, comparison: Comparison, blocks: bool) -> dict[str, Any]:
        systems = {self.baseline: comparison.baseline, self.candidate: comparison.candidate, **comparison.beside}
        return {
            "what": comparison.what,
            "systems": {name: _as_data(series, blocks) for name, series in systems.items()},
            "ratio": comparison.ratio(),
            "pair_ratios": comparison.pair_ratios(),
            "targets": dict(comparison.targets),
        }

    def write_json(self, path: Path) -> None:
        """Write all results in seconds, down to single iterations."""
        path.write_text(json.dumps(self.as_data(), indent=1) + "\n")


def is_met(ratio: float, target: float) -> bool:
    """Whether a ratio, rounded to the two digits that are printed, is at most its target."""
    return round(ratio, 2) <= target


def columns(rows: Sequence[Sequence[str]], left: Sequence[int] = (0,)) -> list[str]:
    """Align cells in columns: to the right, except for the columns in `left`."""
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
    """Describe the machine. The load shows whether other programs were running."""
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory": f"{pages / (1 << 30):.0f} GB",
        "kernel": platform.release(),
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "telegrad")},
        "load": " ".join(f"{load:.1f}" for load in os.getloadavg()),
    }


def _processor() -> str:
    with contextlib.suppress(OSError):  # not available on every kernel
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.machine()


def _median_and_p99(series: Series) -> tuple[float, float]:
    return series.median(), series.percentile(99)


def _as_data(series: Series, blocks: bool) -> dict[str, Any]:
    median, p99 = _median_and_p99(series)
    every = {"blocks": series.blocks} if blocks else {}
    return {"median": median, "p99": p99, "count": series.count(), **every}


def _with_target(ratio: float, target: float | None) -> tuple[str, str, str]:
    if target is None:
        return f"{ratio:.2f}", "", ""
    return f"{ratio:.2f}", f"{target:.2f}", "yes" if is_met(ratio, target) else "NO"


def _microseconds(seconds: float) -> str:
    return f"{seconds * 1e6:,.0f}"
