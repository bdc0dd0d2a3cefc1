"""Runs universes: whole programs over many workers, with every fault: ``make simulate SEEDS=10000``.

python -m telegrad.testing.simulate --first 0 --seeds 1000 --jobs 2
python -m telegrad.testing.simulate --seed 1234
python -m telegrad.testing.simulate --without resend --seeds 2000 --stop
"""

from __future__ import annotations

import argparse
import logging
import sys
import traceback
from functools import partial

import torch

from telegrad.testing.seed_runner import SeedResult, report, run_seeds
from telegrad.testing.universe.run import run_seed
from telegrad.testing.universe.switched_off import RULES, switched_off
from telegrad.testing.universe.world import Violated

STALLED = 60.0
"""Seconds of real time for one universe. Most take some milliseconds."""


def check_seed(seed: int) -> SeedResult:
    """Run the universe of a seed."""
    torch.set_num_threads(1)
    try:
        found = run_seed(seed)
    except Violated as error:
        return SeedResult(seed, "FAILED", str(error))
    except BaseException as error:  # noqa: BLE001 - reported with its seed, and the others continue
        return SeedResult(seed, "FAILED", f"seed {seed}: {''.join(traceback.format_exception(error))}")
    kinds = sorted(name for name, count in found.counts.items() if name.startswith("fault ") and count)
    return SeedResult(seed, "with faults" if kinds else "without faults")


def show(seed: int) -> int:
    """Print the story of one seed. Return 1 if it failed, for the command."""
    logger = logging.getLogger("telegrad")
    before = logger.level
    logger.setLevel(logging.CRITICAL)  # injected faults log warnings
    try:
        found = run_seed(seed)
    except Violated as error:
        sys.stdout.write(f"{error}\n")
        return 1
    finally:
        logger.setLevel(before)
    sys.stdout.write(f"{found.plan}\n{found.story}\nNothing was violated. Fingerprint {found.fingerprint:08x}\n")
    return 0


def main(arguments: list[str] | None = None) -> int:
    """Run universes. Return 1 if one failed."""
    parser = argparse.ArgumentParser(description="Whole programs over many workers with every fault, in simulation.")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--seeds", type=int, default=1000, help="how many seeds to run")
    parser.add_argument("--jobs", type=int, default=2, help="how many processes to use")
    parser.add_argument("--seed", type=int, help="run this seed only, and print its story")
    parser.add_argument("--without", choices=sorted(RULES), help="switch off one rule of the protocol")
    parser.add_argument("--stop", action="store_true", help="stop at the first failure")
    options = parser.parse_args(arguments)
    apply = partial(switched_off, options.without)
    if options.seed is not None:
        with apply():
            return show(options.seed)
    results = run_seeds(options.first, options.seeds, check_seed, processes=options.jobs, stalled=STALLED, apply=apply)
    return report(results, stop=options.stop)


if __name__ == "__main__":
    raise SystemExit(main())
