"""How the cost of barriers and shutdowns grows with the workers of a group, and what a link takes.

    python benchmarks/growth_workers.py [--workers 8 32 64 96] [--json FILE]

The workers are processes of `scaling.py`, which share the cores of one machine: n times as many take n times as long,
even if each does the same. So growth is held against a bound for the whole range, from the smallest group to the
largest. The exit code is 1 if a bound is exceeded. `draw_growth.py` draws the figures.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tracemalloc
from collections.abc import Mapping, Sequence
from pathlib import Path

import scaling
from measure import machine

import telegrad
from telegrad.testing.group import local_group
from telegrad.transport import spinning

STEPS = ("barrier", "shutdown")
MEMORY = "private MB"
MOST_GROWTH = 1.25
"""The largest allowed growth of the slowest worker's time, for each worker: 15 times for 12 times as many."""
MOST_LINK = 16 * 1024
"""Bytes of Python's memory that an idle link may take."""
_LINKS = 32
PACKAGE = Path(telegrad.__file__).parent


def processes(counts: Sequence[int]) -> dict[str, dict[int, float]]:
    """Return the seconds of the slowest worker in each step, and the memory of a worker, by the size of the group."""
    found: dict[str, dict[int, float]] = {step: {} for step in STEPS}
    found |= {f"{MEMORY}, median": {}, f"{MEMORY}, most": {}}
    for count in counts:
        figures = scaling.real(count)
        for step in STEPS:
            found[step][count] = figures[step]["max"]
        found[f"{MEMORY}, median"][count] = figures[MEMORY]["median"]
        found[f"{MEMORY}, most"][count] = figures[MEMORY]["max"]
        times = "".join(f"{found[step][count] * 1e3:>12.1f}" for step in STEPS)
        memory = f"{figures[MEMORY]['median']:>12.1f}{figures[MEMORY]['max']:>12.1f}"
        print(f"{count:>8} workers{times}{memory}", flush=True)
    return found


def growth_of(figures: Mapping[int, float]) -> float:
    """Return how much a time grows from the smallest group to the largest, for each worker that it has more.

    >>> growth_of({8: 0.01, 32: 0.03, 96: 0.15})
    1.25
    """
    fewest, most = min(figures), max(figures)
    return figures[most] / figures[fewest] / (most / fewest)


def link_bytes() -> float:
    """Return the bytes of Python's memory that one end of an idle connection takes, between agents of one process."""
    names = [f"w{number}" for number in range(_LINKS)]
    with local_group(["a", "warm", *names]) as group:
        for name in ("a", *names):  # the first call of an agent takes memory of its own
            group[name].call("warm", int, ())
            group["warm"].call(name, int, ())
        tracemalloc.start()
        try:
            before = _traced()
            for name in names:
                group["a"].call(name, int, ())
            return (_traced() - before) / (2 * _LINKS)
        finally:
            tracemalloc.stop()


def _traced() -> int:
    """Return the memory that the code of links, channels and sessions has taken."""
    gc.collect()
    code = [tracemalloc.Filter(True, f"{PACKAGE}/{part}/*") for part in ("transport", "connection", "protocol", "wire")]
    polling = tracemalloc.Filter(False, spinning.__file__)  # for each thread that polls, not for a link
    snapshot = tracemalloc.take_snapshot().filter_traces([*code, polling])
    return sum(trace.size for trace in snapshot.traces)


def report(found: Mapping[str, Mapping[int, float]], link: float) -> bool:
    """Print how much each step grows, and what a link takes, and return whether all bounds are kept."""
    kept = link <= MOST_LINK
    for step in STEPS:
        growth, times = growth_of(found[step]), max(found[step]) / min(found[step])
        kept = kept and growth <= MOST_GROWTH
        most = f"at most {MOST_GROWTH * times:g}{'' if growth <= MOST_GROWTH else ': MORE'}"
        print(f"{step}: {growth * times:.1f} times for {times:g} times as many, {most}")
    print(f"an idle link: {link / 1024:.1f} KB, at most {MOST_LINK / 1024:g}{'' if link <= MOST_LINK else ': MORE'}")
    return kept


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print a table, and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[8, 32, 64, 96], help="processes")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    options = parser.parse_args(arguments)
    facts = machine()
    print(f"{'slowest, ms; memory, MB':16}" + "".join(f"{name:>12}" for name in (*STEPS, "median", "most")))
    found, link = processes(options.workers), link_bytes()
    if options.json is not None:
        options.json.write_text(json.dumps({"machine": facts, "workers": found, "link bytes": link}, indent=1) + "\n")
    return int(not report(found, link))


if __name__ == "__main__":
    sys.exit(main())
