"""Compares many random programs with autograd in one process: ``make soak SEEDS=10000``.

python -m telegrad.testing.soak --first 0 --seeds 1000 --processes 2 --only inputs,multi_grad
"""

from __future__ import annotations

import argparse
import traceback
from collections.abc import Generator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial

from telegrad.testing import accelerator, seed_runner
from telegrad.testing.backward import Checked, check_programs, draw_programs
from telegrad.testing.programs import DEVICES, FEATURES, Program, chosen, shrink
from telegrad.testing.seed_runner import STALLED, Apply, SeedResult, report
from telegrad.testing.simulation import Faults


def run_seed(seed: int, features: Mapping[str, float] = FEATURES) -> str:
    """Run one seed like the soak: some with two programs at once, some with faults, some without resumable links.

    With the feature `DEVICES`, copies of devices are delayed in half of the seeds.
    """
    if DEVICES in features:
        accelerator.install()
        accelerator.set_asynchronous(seed % 2 == 1)
    checked = _check(seed, draw_programs(seed, _together(seed), features))
    if checked.refusals:
        return f"equal until: {checked.refusals[0]}"
    return "equal, with a probe" if checked.probes else "equal, no probe"


def _together(seed: int) -> int:
    return 2 if seed % 10 in (0, 1) else 1


def _check(seed: int, programs: Sequence[Program]) -> Checked:
    faults = Faults(longest_delay=0.02)
    if seed % 7 == 3:
        faults = Faults(longest_delay=0.02, drop=0.005, duplicate=0.01, cut=0.005)
    return check_programs(programs, seed, faults=faults, resumable=seed % 2 == 0)


def shrunk(seed: int, features: Mapping[str, float] = FEATURES) -> str:
    """Return the smallest program found that still fails for this seed, and its failure."""
    programs = draw_programs(seed, _together(seed), features)
    last = "the seed does not fail"

    def fails(index: int, smaller: Program) -> bool:
        nonlocal last
        try:
            _check(seed, [*programs[:index], smaller, *programs[index + 1 :]])
        except AssertionError as error:
            last = "\n".join([str(error), *(str(other) for place, other in enumerate(programs) if place != index)])
            return True
        return False

    for index, program in enumerate(programs):
        if fails(index, program):
            programs[index] = shrink(program, partial(fails, index))
    return last


def run_seeds(
    first: int,
    count: int,
    features: Mapping[str, float] = FEATURES,
    *,
    processes: int = 2,
    stalled: float = STALLED,
    apply: Apply = nullcontext,
    shrinking: bool = False,
) -> Generator[SeedResult, None, None]:
    """Run seeds in child processes; see `seed_runner`. With `shrinking`, failing programs are shrunk."""
    run = partial(_result_of, dict(features), shrinking)
    return seed_runner.run_seeds(first, count, run, processes=processes, stalled=stalled, apply=apply)


def _result_of(features: Mapping[str, float], shrinking: bool, seed: int) -> SeedResult:
    try:
        return SeedResult(seed, run_seed(seed, features))
    except BaseException as error:  # noqa: BLE001 - reported with its seed, and the soak continues
        if shrinking:
            return SeedResult(seed, "FAILED", f"seed {seed}: {shrunk(seed, features)}")
        return SeedResult(seed, "FAILED", f"seed {seed}: {''.join(traceback.format_exception(error))}")


def main(arguments: list[str] | None = None) -> int:
    """Run the soak. Return 1 if a seed failed."""
    parser = argparse.ArgumentParser(description="Random distributed programs against one-process autograd.")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--seeds", type=int, default=1000, help="how many seeds to run")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--only", help=f"use these features in every program, and no others: {', '.join(FEATURES)}")
    parser.add_argument("--without", help="use these features in no program")
    parser.add_argument("--devices", action="store_true", help="place values at random on two simulated devices")
    parser.add_argument("--stop", action="store_true", help="stop at the first failure")
    parser.add_argument("--shrink", action="store_true", help="shrink the programs of failing seeds")
    parser.add_argument("--stalled", type=float, default=STALLED, help="kill a seed after so many seconds of real time")
    options = parser.parse_args(arguments)
    names = [
        None if given is None else [name for name in given.split(",") if name]
        for given in (options.only, options.without)
    ]
    features = chosen(names[0], names[1] or ())
    if options.devices:
        features[DEVICES] = 1.0
    run = partial(run_seeds, processes=options.processes, stalled=options.stalled, shrinking=options.shrink)
    return report(run(options.first, options.seeds, features), stop=options.stop)


if __name__ == "__main__":
    raise SystemExit(main())
