"""All benchmarks that compare telegrad with torch are one command: the same options, the same table, the same JSON."""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from measure import Comparison, Report, Series, alternate, machine
from pairs import TELEGRAD, TORCH, BenchmarkError, Case, System, SystemFailedError, Workers, started

TRANSPORTS = "unix", "tcp"
ROUNDS = 5
"""How often all processes are started anew. Where its memory lies can make a process twice as slow for all its life."""
PATIENCE = 2
"""How often a round is done again because another system failed in it."""
Turns = Callable[[Mapping[str, Workers], str, int], Mapping[str, tuple[Workers, str]]]
"""From the systems, a case and its place among those chosen: who takes turns in it, and with which case.

Torch and telegrad must be among them; what the others show is reported beside them.
"""


@dataclass(frozen=True)
class Benchmark:
    """Some cases, and the systems that are compared in them."""

    program: str
    description: str
    cases: Mapping[str, Case]
    systems: Mapping[str, System]
    turns: Turns
    hidden: Mapping[str, Case] = field(default_factory=dict)
    """Cases that `turns` may name, and the user may not."""

    def measure(self, transport: str, cases: Sequence[str], blocks: int, quick: bool) -> Report:
        """Run these cases, and return what was found."""
        facts = machine()
        rounds = 1 if quick else min(ROUNDS, blocks)
        taken: dict[str, dict[str, Series]] = {}
        for number in range(rounds):
            share = blocks * (number + 1) // rounds - blocks * number // rounds
            for name, fresh in self._round_again(transport, cases, share, quick).items():
                before = taken.get(name)
                taken[name] = fresh if before is None else {who: before[who].and_then(fresh[who]) for who in fresh}
            for name, series in taken.items():
                ratio = series[TELEGRAD].median() / series[TORCH].median()
                print(f"{name}, round {number + 1} of {rounds}: {ratio:.2f}", file=sys.stderr, flush=True)
        settings = {"transport": transport, "blocks": blocks, "rounds": rounds, "quick": quick}
        compared = [self._compared(transport, name, taken[name]) for name in cases]
        return Report(TORCH, TELEGRAD, settings, compared, facts)

    def _round_again(
        self, transport: str, cases: Sequence[str], blocks: int, quick: bool
    ) -> dict[str, dict[str, Series]]:
        """A round; again if another system fails in it, as torch's now and then does. Telegrad may not."""
        for _ in range(PATIENCE):
            try:
                return self._round(transport, cases, blocks, quick)
            except SystemFailedError as failure:
                if failure.system == TELEGRAD:
                    raise
                print(f"the round is done again: {failure}", file=sys.stderr, flush=True)
        return self._round(transport, cases, blocks, quick)

    def _round(self, transport: str, cases: Sequence[str], blocks: int, quick: bool) -> dict[str, dict[str, Series]]:
        """So many blocks of each case, with processes of their own."""
        known = {**self.cases, **self.hidden}
        taken = {}
        with started(self.systems, known, transport) as ready:
            for number, name in enumerate(cases):
                iterations = max(2, known[name].iterations // 10) if quick else known[name].iterations
                taking_part = self.turns(ready, name, number)
                runs = {who: workers.runs(what, iterations) for who, (workers, what) in taking_part.items()}
                taken[name] = alternate(runs, blocks)
        return taken

    def _compared(self, transport: str, name: str, taken: Mapping[str, Series]) -> Comparison:
        case = self.cases[name]
        beside = {who: series for who, series in taken.items() if who not in (TORCH, TELEGRAD)}
        targets = case.targets.get(transport, {})
        return Comparison(name, case.what, taken[TORCH], taken[TELEGRAD], beside, targets)


def run(benchmark: Benchmark, arguments: Sequence[str] | None = None) -> int:
    """Run a benchmark as a command, and return its exit code."""
    parser = argparse.ArgumentParser(description=benchmark.description)
    parser.add_argument("--transport", choices=TRANSPORTS, default=TRANSPORTS[0], help="unix: torch's default options")
    parser.add_argument(
        "--cases",
        nargs="+",
        choices=tuple(benchmark.cases),
        default=list(benchmark.cases),
        metavar="CASE",
        help="of %(choices)s",
    )
    add_amount(parser)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there, too")
    options = parser.parse_args(arguments)
    with ending_in_a_line(benchmark.program) as end:
        report = benchmark.measure(options.transport, options.cases, blocks(options), options.quick)
        print(report.text())
        if options.json is not None:
            report.write_json(options.json)
    return end.code


def add_amount(parser: argparse.ArgumentParser) -> None:
    """The options that say how much is measured."""
    parser.add_argument("--blocks", type=_at_least_one, help="blocks per system and case (10; with --quick, 2)")
    parser.add_argument("--quick", action="store_true", help="a tenth of the iterations: to see that it works")


def blocks(options: argparse.Namespace) -> int:
    """How many blocks these options ask for."""
    return options.blocks or (2 if options.quick else 10)


@dataclass
class End:
    """How a command ends."""

    code: int = 0


@contextlib.contextmanager
def ending_in_a_line(program: str) -> Iterator[End]:
    """Turn what ends a run early into one line and an exit code."""
    end = End()
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        yield end
    except BenchmarkError as error:
        print(f"{program}: {error}", file=sys.stderr)
        end.code = 1
    except KeyboardInterrupt:
        print(f"{program}: interrupted", file=sys.stderr)
        end.code = 130


def _at_least_one(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not 1 or more")
    return number


def _interrupt(number: int, frame: object) -> NoReturn:
    raise KeyboardInterrupt
