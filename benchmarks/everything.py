"""Runs all benchmarks over both transports, and writes one file of figures and one picture: `make bench`.

    python benchmarks/everything.py [--quick] [--blocks N] [--transports unix tcp] [--cases noop ...]
                                    [--json FILE] [--picture FILE]

Prints a table after each benchmark, and the missed targets at the end. Writes the figures to
`benchmarks/results/latest.json` and the picture to `docs/benchmarks.svg`.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import command
import draw
import observing
import others
import training
from measure import is_met, machine
from pairs import TELEGRAD, BenchmarkError

import backward
import calls

BENCHMARKS = calls.BENCHMARK, backward.BENCHMARK, training.BENCHMARK
CASES = tuple(dict.fromkeys(case for benchmark in BENCHMARKS for case in benchmark.cases))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all benchmarks as a command."""
    options = _parse(arguments)
    figures: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        # Before anything runs, so the load is that of other programs.
        "machine": {**machine(), **others.versions()},
        "settings": {"blocks": command.blocks(options), "quick": options.quick},
        "runs": [],
        "events": {},
        "failed": {},
    }
    with command.reporting_errors("everything.py") as end:
        for benchmark, transport in _plan(options.transports):
            cases = [case for case in benchmark.cases if case in options.cases]
            if cases:
                _measure(benchmark, transport, cases, figures)
        for transport in options.transports:
            _measure_observing(transport, [case for case in observing.CASES if case in options.cases], figures)
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(figures, indent=1) + "\n")
        print("\n".join(summary(figures)))
        print(f"All figures: {options.json}")
        if figures["failed"]:
            raise BenchmarkError("no picture was drawn, because not everything ran")
        options.picture.write_text(draw.draw(figures).svg())
        print(f"As a picture: {options.picture}")
    return end.code


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Run all benchmarks, and draw the results.")
    add_choices(parser)
    command.add_amount(parser)
    parser.add_argument("--json", type=Path, default=draw.FIGURES, metavar="FILE", help="(%(default)s)")
    parser.add_argument("--picture", type=Path, default=draw.PICTURE, metavar="FILE", help="(%(default)s)")
    return parser.parse_args(arguments)


def add_choices(parser: argparse.ArgumentParser) -> None:
    """Add the options that set what is measured."""
    parser.add_argument(
        "--transports", nargs="+", choices=command.TRANSPORTS, default=command.TRANSPORTS, help="(both)"
    )
    parser.add_argument("--cases", nargs="+", choices=CASES, default=CASES, metavar="CASE", help="of %(choices)s")


def _plan(transports: Sequence[str]) -> Iterator[tuple[command.Benchmark, str]]:
    for transport in transports:
        for benchmark in BENCHMARKS:
            yield benchmark, transport
    others.explain_absence()
    # Ray has only one transport between processes on a host.
    if others.installed() and "unix" in transports:
        yield others.BENCHMARK, "unix"


def _measure(benchmark: command.Benchmark, transport: str, cases: Sequence[str], figures: dict[str, Any]) -> None:
    """Add the results of a benchmark, or the reason why it failed. The others still run."""
    title = f"{benchmark.program} over {transport}"
    print(f"\n== {title}\n", flush=True)
    settings = figures["settings"]
    try:
        report = benchmark.measure(transport, cases, settings["blocks"], settings["quick"])
    except BenchmarkError as error:
        print(f"{title}: {error}", file=sys.stderr)
        figures["failed"][title] = str(error)
        return
    print(report.text(), flush=True)
    found = report.as_data(blocks=False)
    load = found["machine"]["load"]
    figures["runs"].append(
        {"program": benchmark.program, "transport": transport, "load": load, "cases": found["cases"]}
    )


def _measure_observing(transport: str, cases: Sequence[str], figures: dict[str, Any]) -> None:
    """Add what the event stream costs, with a target of its own."""
    if not cases:
        return
    print(f"\n== {observing.PROGRAM} over {transport}\n", flush=True)
    blocks, rounds = (2, 1) if figures["settings"]["quick"] else (observing.BLOCKS, observing.ROUNDS)
    found = figures["events"][transport] = observing.measure(transport, cases, blocks, rounds)
    print(observing.text(transport, found), flush=True)


def summary(figures: Mapping[str, Any]) -> list[str]:
    """Return lines that say how many targets were met, and which were missed."""
    met, missed = 0, []
    for run in figures["runs"]:
        for case, found in run["cases"].items():
            medians = {name: system["median"] for name, system in found["systems"].items()}
            for system, target in found["targets"].items():
                ratio = medians[TELEGRAD] / medians[system]
                if is_met(ratio, target):
                    met += 1
                else:
                    where = f"{run['program']} {case} over {run['transport']}"
                    missed.append(f"  {where}: {ratio:.2f} of {system}, and should be at most {target:.2f}")
    for transport, events in figures["events"].items():
        for case, found in events.items():
            if observing.is_met(found["ratio"]):
                met += 1
            else:
                where = f"{observing.PROGRAM} {case} over {transport}"
                missed.append(f"  {where}: {found['ratio']:.3f}, and should be at most {observing.MOST:.2f}")
    return [
        "",
        f"{met} of {met + len(missed)} targets are met{'.' if not missed else '; these are not:'}",
        *missed,
        *(f"  {title} did not run" for title in figures["failed"]),
        f"Load before the run: {figures['machine']['load']}, on {figures['machine']['cores']} cores.",
    ]


if __name__ == "__main__":
    sys.exit(main())
