"""Compares two source trees of telegrad with each other and with torch, in turn, in one run.

    python benchmarks/compare.py OLD NEW [--transports unix tcp] [--cases noop ...] [--rounds N] [--blocks N]
                                         [--quick] [--json FILE]

OLD and NEW are git revisions (`main`, `HEAD~3`) or directories (`.` has the changes that are not committed). The cases
are those of `make bench`, as defined in this folder, for both trees. Prints one table in Markdown.

Processes are restarted in each round: memory placement can make a process slow for life, so one round may differ by
chance. The ratio of the trees is the median of the ratios of all rounds. A difference is more than noise if it is
unlikely in rounds that differ by chance: the signs of the rounds' differences are flipped in all ways, and at most 2 %
of these ways may give a difference as large.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import command
import everything
from measure import Series, alternate, machine
from pairs import TELEGRAD, TORCH, BenchmarkError, SystemFailedError
from tree_host import Begin, RunBlock, TreeHost, hosting
from trees import Tree, open_tree

OLD, NEW = "old", "new"
WHO = TORCH, OLD, NEW
ROUNDS, BLOCKS = 8, 2
MOST_ROUNDS = 16
"""2 ** MOST_ROUNDS ways to flip the signs are counted for each case."""
LEVEL = 0.02
"""The largest probability at which a difference is not called noise."""
FEWEST_ROUNDS = next(rounds for rounds in itertools.count(1) if 2 / 2**rounds <= LEVEL)


def probability(ratios: Sequence[float]) -> float:
    """Return how likely a difference as large as that of these ratios is, if each may as well be its inverse.

    >>> probability([0.9] * 8), probability([0.9, 1.1] * 4) > 0.5
    (0.0078125, True)
    """
    logs = [math.log(ratio) for ratio in ratios]
    found = abs(math.fsum(logs)) * (1 - 1e-9)
    # Half of the ways, because the others differ in all signs.
    ways = [
        abs(logs[0] + math.fsum(sign * log for sign, log in zip(signs, logs[1:], strict=True)))
        for signs in itertools.product((1, -1), repeat=len(logs) - 1)
    ]
    return sum(way >= found for way in ways) / len(ways)


@dataclass(frozen=True)
class Row:
    """One case: the series of each round, of torch and both trees."""

    case: str
    what: str
    rounds: Sequence[Mapping[str, Series]]

    def median(self, who: str) -> float:
        """Return the median over all iterations, in seconds."""
        return Series(tuple(block for each in self.rounds for block in each[who].blocks)).median()

    def ratios(self, base: str) -> list[float]:
        """Return the time of the new tree in relation to `base`, of each round."""
        return [each[NEW].median() / each[base].median() for each in self.rounds]

    def difference(self) -> str:
        """Return "faster" or "slower" if the trees differ by more than noise."""
        ratios = self.ratios(OLD)
        if probability(ratios) > LEVEL:
            return ""
        return "faster" if statistics.median(ratios) < 1 else "slower"

    def cells(self) -> list[str]:
        """Return the row as text."""
        ratios = self.ratios(OLD)
        return [
            self.case,
            *(f"{self.median(who) * 1e6:,.0f}" for who in WHO),
            f"{statistics.median(ratios):.2f}",
            f"{min(ratios):.2f} to {max(ratios):.2f}",
            self.difference(),
            f"{statistics.median(self.ratios(TORCH)):.2f}",
        ]

    def as_data(self) -> dict[str, Any]:
        """Return all times in seconds, and what follows from them."""
        return {
            "what": self.what,
            "rounds": [{who: series.blocks for who, series in each.items()} for each in self.rounds],
            "medians": {who: self.median(who) for who in WHO},
            "new/old": self.ratios(OLD),
            "new/torch": self.ratios(TORCH),
            "probability": probability(self.ratios(OLD)),
            "difference": self.difference(),
        }


def report(rows: Sequence[Row], facts: Mapping[str, Any]) -> str:
    """Return the table and what it says, in Markdown."""
    head = ["case", "torch, µs", "old, µs", "new, µs", "new/old", "of rounds", "more than noise", "new/torch"]
    lines = [f"- {name}: {value}" for name, value in facts.items()]
    lines += ["", f"| {' | '.join(head)} |", "|" + " --- |" * len(head)]
    lines += [f"| {' | '.join(row.cells())} |" for row in rows]
    lines += ["", "Medians. Ratios are medians of the rounds' ratios; below 1 the new tree takes less time."]
    if any(len(row.rounds) < FEWEST_ROUNDS for row in rows):
        lines.append(f"No difference can be told from noise with fewer than {FEWEST_ROUNDS} rounds.")
    for difference in ("faster", "slower"):
        cases = [row.case for row in rows if row.difference() == difference]
        lines.append(f"{len(cases)} of {len(rows)} are {difference}{': ' if cases else ''}{', '.join(cases)}.")
    return "\n".join(lines)


def measure(
    hosts: Mapping[str, TreeHost],
    benchmark: command.Benchmark,
    transport: str,
    options: argparse.Namespace,
    rows: list[Row],
) -> None:
    """Run the rounds of a benchmark over a transport, and add its rows, which grow with each round."""
    program, cases = benchmark.program.removesuffix(".py"), [case for case in benchmark.cases if case in options.cases]
    rounds: dict[str, list[dict[str, Series]]] = {case: [] for case in cases}
    for number in range(options.rounds if cases else 0):
        found = _round_with_retries(hosts, benchmark, transport, cases, options)
        for case in cases:
            rounds[case].append(found[case])
        if not number:
            whats = {case: benchmark.cases[case].what for case in cases}
            rows += [Row(f"{program} {case}, {transport}", whats[case], rounds[case]) for case in cases]
        print(f"{benchmark.program} over {transport}, round {number + 1} of {options.rounds}", file=sys.stderr)


def _round_with_retries(
    hosts: Mapping[str, TreeHost],
    benchmark: command.Benchmark,
    transport: str,
    cases: Sequence[str],
    options: argparse.Namespace,
) -> dict[str, dict[str, Series]]:
    """Run a round, and repeat it if torch fails in it, which happens. Telegrad must not."""
    for _ in range(command.PATIENCE):
        try:
            return _round(hosts, benchmark, transport, cases, options)
        except SystemFailedError as failure:
            if failure.system != TORCH:
                raise
            print(f"repeating the round: {failure}", file=sys.stderr)
    return _round(hosts, benchmark, transport, cases, options)


def _round(
    hosts: Mapping[str, TreeHost],
    benchmark: command.Benchmark,
    transport: str,
    cases: Sequence[str],
    options: argparse.Namespace,
) -> dict[str, dict[str, Series]]:
    """Run the blocks of each case in new processes. Torch runs in the host of the new tree."""
    turns = {case: _turns(benchmark, case, number) for number, case in enumerate(cases)}
    measured = {}
    with ExitStack() as running:
        for tree, host in hosts.items():
            systems = {system: None for each in turns.values() for on, system, _ in each.values() if on == tree}
            running.enter_context(host.round(Begin(benchmark.program, tuple(systems), transport)))
        for case, each in turns.items():
            iterations = benchmark.iterations(case, options.quick)
            runs = {
                who: partial(hosts[tree].run, RunBlock(system, what, iterations))
                for who, (tree, system, what) in each.items()
            }
            measured[case] = alternate(runs, options.blocks)
    return measured


def _turns(benchmark: command.Benchmark, case: str, number: int) -> dict[str, tuple[str, str, str]]:
    """Return the tree, the system and the name of the case, for torch and both trees."""
    # Names instead of workers: the systems run in other processes.
    names = benchmark.turns({name: name for name in benchmark.systems}, case, number)
    return {TORCH: (NEW, *names[TORCH]), OLD: (OLD, *names[TELEGRAD]), NEW: (NEW, *names[TELEGRAD])}


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare two trees as a command. What was measured before an interrupt is reported."""
    options = _parse(arguments)
    failed = []
    rows: list[Row] = []
    interrupted = False
    with command.reporting_errors("compare.py") as end, tempfile.TemporaryDirectory(prefix="telegrad-trees-") as folder:
        trees = {who: open_tree(getattr(options, who), Path(folder, who)) for who in (OLD, NEW)}
        facts = _facts(trees, options)
        try:
            with hosting(list(trees.values())) as hosts:
                for transport, benchmark in itertools.product(options.transports, everything.BENCHMARKS):
                    try:
                        measure(dict(zip(trees, hosts, strict=True)), benchmark, transport, options, rows)
                    except SystemFailedError as error:  # the other benchmarks still run
                        print(f"{benchmark.program} over {transport}: {error}", file=sys.stderr)
                        failed.append(f"{benchmark.program} over {transport}")
        except KeyboardInterrupt:
            interrupted = True
        if rows:
            print(report(rows, facts))
        if options.json is not None:
            found = {row.case: row.as_data() for row in rows}
            options.json.write_text(json.dumps({"facts": facts, "cases": found, "failed": failed}, indent=1) + "\n")
        if failed:
            raise BenchmarkError(f"these did not run to their end: {', '.join(failed)}")
        if interrupted:
            raise KeyboardInterrupt
    return end.code


def _facts(trees: Mapping[str, Tree], options: argparse.Namespace) -> dict[str, Any]:
    known = machine()
    del known["telegrad"]  # the version of neither tree
    settings = f"{options.rounds} rounds of {options.blocks} blocks{', quick' if options.quick else ''}"
    return {**{who: tree.label for who, tree in trees.items()}, **known, "settings": settings}


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Compare two trees of telegrad with each other and with torch.")
    for who in (OLD, NEW):
        parser.add_argument(who, metavar=who.upper(), help="a git revision, or a directory that contains src/telegrad")
    everything.add_choices(parser)
    parser.add_argument(
        "--rounds", type=_rounds, default=ROUNDS, help=f"restarts of all processes, at most {MOST_ROUNDS} (%(default)s)"
    )
    parser.add_argument("--blocks", type=command.at_least_one, default=BLOCKS, help="of each in a round (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="run a tenth of the iterations, to see that it works")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all figures to this file")
    return parser.parse_args(arguments)


def _rounds(text: str) -> int:
    number = command.at_least_one(text)
    if number > MOST_ROUNDS:
        raise argparse.ArgumentTypeError(f"{number} is more than {MOST_ROUNDS}")
    return number


if __name__ == "__main__":
    sys.exit(main())
