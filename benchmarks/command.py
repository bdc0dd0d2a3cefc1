"""All benchmarks that compare telegrad with torch are one command: the same options, the same table, the same JSON."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from measure import Comparison, Report, Series, alternate, machine
from pairs import TELEGRAD, TORCH, BenchmarkError, Case, System, Workers, started

Turns = Callable[[Mapping[str, Workers], str, int], Mapping[str, tuple[Workers, str]]]
"""From the systems, a case and its place among those chosen: who takes turns in it, and with which case.

Torch and telegrad must be among them; what the others show is reported as information.
"""


def run(
    program: str,
    description: str,
    cases: Mapping[str, Case],
    systems: Mapping[str, System],
    turns: Turns,
    *,
    hidden: Mapping[str, Case] | None = None,
    arguments: Sequence[str] | None = None,
) -> int:
    """Run a benchmark as a command, and return its exit code.

    `hidden` are cases that `turns` may name, and the user may not.
    """
    options = _parse(description, cases, arguments)
    known = {**cases, **(hidden or {})}
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        with started(systems, known, options.transport) as ready:
            report = _compare(options, known, ready, turns)
    except BenchmarkError as error:
        print(f"{program}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"{program}: interrupted", file=sys.stderr)
        return 130
    print(report.text())
    if options.json is not None:
        report.write_json(options.json)
    return 0


def _parse(description: str, cases: Mapping[str, Case], arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--transport", choices=("unix", "tcp"), default="unix", help="unix: torch's default options")
    parser.add_argument(
        "--cases", nargs="+", choices=tuple(cases), default=list(cases), metavar="CASE", help="of %(choices)s"
    )
    parser.add_argument("--blocks", type=_at_least_one, help="blocks per system and case (10; with --quick, 2)")
    parser.add_argument("--quick", action="store_true", help="a tenth of the iterations: to see that it works")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there, too")
    options = parser.parse_args(arguments)
    options.blocks = options.blocks or (2 if options.quick else 10)
    return options


def _compare(
    options: argparse.Namespace, cases: Mapping[str, Case], ready: Mapping[str, Workers], turns: Turns
) -> Report:
    facts = machine()
    comparisons: list[Comparison] = []
    alone: dict[str, Series] = {}
    for number, name in enumerate(options.cases):
        case = cases[name]
        iterations = max(2, case.iterations // 10) if options.quick else case.iterations
        taking_part = turns(ready, name, number)
        measured = alternate(
            {who: workers.runs(what, iterations) for who, (workers, what) in taking_part.items()}, options.blocks
        )
        comparisons.append(Comparison(name, case.what, measured.pop(TORCH), measured.pop(TELEGRAD)))
        alone.update({cases[taking_part[who][1]].what: series for who, series in measured.items()})
        print(f"{name}: {comparisons[-1].ratio():.2f}", file=sys.stderr, flush=True)
    settings = {"transport": options.transport, "blocks": options.blocks, "quick": options.quick}
    return Report(TORCH, TELEGRAD, settings, comparisons, alone, facts)


def _at_least_one(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not 1 or more")
    return number


def _interrupt(number: int, frame: object) -> NoReturn:
    raise KeyboardInterrupt
