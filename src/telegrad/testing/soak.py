"""Runs as many random programs as you like against the oracle: ``make soak SEEDS=10000``.

python -m telegrad.testing.soak --first 0 --seeds 1000 --processes 2
"""

from __future__ import annotations

import argparse
import faulthandler
import logging
import multiprocessing
import sys
import time
import traceback
from collections import Counter

from telegrad.testing.backward import check_seed
from telegrad.testing.simulation import Faults

_STALLED = 120.0  # seconds of real time for one seed, after which all stacks are shown


def run_seed(seed: int) -> str:
    """Run one seed as the soak does: some with two programs at once, some with faults, some as on one host."""
    faults = Faults(longest_delay=0.02)
    if seed % 7 == 3:
        faults = Faults(longest_delay=0.02, drop=0.005, duplicate=0.01, cut=0.005)
    probes = check_seed(seed, faults=faults, together=2 if seed % 10 in (0, 1) else 1, resumable=seed % 2 == 0)
    return "equal, with a probe" if probes else "equal, no probe"


def _run_block(block: range) -> tuple[Counter[str], list[str]]:
    logging.getLogger("telegrad").setLevel(logging.CRITICAL)  # faults are what is wanted here
    counts: Counter[str] = Counter()
    failures = []
    for seed in block:
        faulthandler.dump_traceback_later(_STALLED, exit=True)
        try:
            counts[run_seed(seed)] += 1
        except BaseException as error:  # noqa: BLE001 - reported with its seed; the soak goes on
            counts["FAILED"] += 1
            failures.append(f"seed {seed}: {''.join(traceback.format_exception(error))}")
    faulthandler.cancel_dump_traceback_later()
    return counts, failures


def main(arguments: list[str] | None = None) -> int:
    """Run the soak; 1 if a seed failed."""
    parser = argparse.ArgumentParser(description="Random distributed programs against one-process autograd.")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--seeds", type=int, default=1000, help="how many")
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args(arguments)
    blocks = [
        range(start, min(start + 100, options.first + options.seeds))
        for start in range(options.first, options.first + options.seeds, 100)
    ]
    total: Counter[str] = Counter()
    begin = shown = time.monotonic()
    with multiprocessing.get_context("spawn").Pool(options.processes) as pool:
        for counts, failures in pool.imap_unordered(_run_block, blocks):
            total += counts
            for failure in failures:
                sys.stdout.write(failure + "\n")
            if time.monotonic() - shown > 30 or failures:
                shown = time.monotonic()
                sys.stdout.write(f"{sum(total.values()):,} seeds in {shown - begin:.0f} s: {dict(total)}\n")
                sys.stdout.flush()
    sys.stdout.write(f"{sum(total.values()):,} seeds in {time.monotonic() - begin:.0f} s: {dict(total)}\n")
    return 1 if total["FAILED"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
