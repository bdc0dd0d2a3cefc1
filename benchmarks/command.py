"""The command line of all comparison benchmarks: common options, table and JSON."""

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
"""How often all processes are restarted. Memory placement alone can make a process twice as slow as another."""
PATIENCE = 2
"""How often a round is repeated because another system failed in it."""
Turns = Callable[[Mapping[str, Workers], str, int], Mapping[str, tuple[Workers, str]]]
"""Takes the systems, a case and its index, and returns which systems take turns, each with the case it runs.

Torch and telegrad must be among them. The others are reported beside them.
"""


@dataclass(frozen=True)
class Benchmark:
    """A set of cases, and the systems that they compare."""

    program: str
    description: str
    cases: Mapping[str, Case]
    systems: Mapping[str, System]
    turns: Turns
    hidden: Mapping[str, Case] = field(default_factory=dict)
    """Cases that only `turns` may name, not the user."""

    def measure(self, transport: str, cases: Sequence[str], blocks: int, quick: bool) -> Report:
        """Run these cases, and return a report."""
        facts = machine()
        rounds = 1 if quick else min(ROUNDS, blocks)
        measured: dict[str, dict[str, Series]] = {}
        for number in range(rounds):
            share = blocks * (number + 1) // rounds - blocks * number // rounds
            for name, fresh in self._round_with_retries(transport, cases, share, quick).items():
                before = measured.get(name)
                measured[name] = (
                    fresh if before is None else {who: before[who].followed_by(fresh[who]) for who in fresh}
                )
            for name, series in measured.items():
                ratio = series[TELEGRAD].median() / series[TORCH].median()
                print(f"{name}, round {number + 1} of {rounds}: {ratio:.2f}", file=sys.stderr, flush=True)
        settings = {"transport": transport, "blocks": blocks, "rounds": rounds, "quick": quick}
        compared = [self._compared(transport, name, measured[name]) for name in cases]
        return Report(TORCH, TELEGRAD, settings, compared, facts)

    def _round_with_retries(
        self, transport: str, cases: Sequence[str], blocks: int, quick: bool
    ) -> dict[str, dict[str, Series]]:
        """Run a round, and repeat it if another system fails, as torch sometimes does. Telegrad must not."""
        for _ in range(PATIENCE):
            try:
                return self._round(transport, cases, blocks, quick)
            except SystemFailedError as failure:
                if failure.system == TELEGRAD:
                    raise
                print(f"repeating the round: {failure}", file=sys.stderr, flush=True)
        return self._round(transport, cases, blocks, quick)

    def _round(self, transport: str, cases: Sequence[str], blocks: int, quick: bool) -> dict[str, dict[str, Series]]:
        """Run `blocks` blocks of each case, in new processes."""
        known = {**self.cases, **self.hidden}
        measured = {}
        with started(self.systems, known, transport) as ready:
            for number, name in enumerate(cases):
                taking_part = self.turns(ready, name, number)
                iterations = self.iterations(name, quick)
                runs = {who: workers.runs(what, iterations) for who, (workers, what) in taking_part.items()}
                measured[name] = alternate(runs, blocks)
        return measured

    def iterations(self, case: str, quick: bool) -> int:
        """Return the iterations in a block of a case."""
        every = self.cases[case].iterations
        return max(2, every // 10) if quick else every

    def _compared(self, transport: str, name: str, measured: Mapping[str, Series]) -> Comparison:
        case = self.cases[name]
        beside = {who: series for who, series in measured.items() if who not in (TORCH, TELEGRAD)}
        targets = case.targets.get(transport, {})
        return Comparison(name, case.what, measured[TORCH], measured[TELEGRAD], beside, targets)


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
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all figures to this file")
    options = parser.parse_args(arguments)
    with reporting_errors(benchmark.program) as end:
        report = benchmark.measure(options.transport, options.cases, blocks(options), options.quick)
        print(report.text())
        if options.json is not None:
            report.write_json(options.json)
    return end.code


def add_amount(parser: argparse.ArgumentParser) -> None:
    """Add the options that set how much is measured."""
    parser.add_argument("--blocks", type=at_least_one, help="blocks per system and case (10; with --quick, 2)")
    parser.add_argument("--quick", action="store_true", help="run a tenth of the iterations, to see that it works")


def blocks(options: argparse.Namespace) -> int:
    """Return the number of blocks that the options ask for."""
    return options.blocks or (2 if options.quick else 10)


@dataclass
class Exit:
    """The exit code of a command."""

    code: int = 0


@contextlib.contextmanager
def reporting_errors(program: str) -> Iterator[Exit]:
    """Turn an error that ends a run into one line and an exit code."""
    end = Exit()
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        yield end
    except BenchmarkError as error:
        print(f"{program}: {error}", file=sys.stderr)
        end.code = 1
    except KeyboardInterrupt:
        print(f"{program}: interrupted", file=sys.stderr)
        end.code = 130


def at_least_one(text: str) -> int:
    """Parse a number of something."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is less than 1")
    return number


def _interrupt(number: int, frame: object) -> NoReturn:
    raise KeyboardInterrupt
