"""Compares many random programs with autograd in one process: ``make soak SEEDS=10000``.

python -m telegrad.testing.soak --first 0 --seeds 1000 --processes 2 --only inputs,multi_grad
"""

from __future__ import annotations

import argparse
import faulthandler
import logging
import math
import multiprocessing
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection, wait

from telegrad.testing import accelerator
from telegrad.testing.backward import Checked, check_programs, draw_programs
from telegrad.testing.programs import DEVICES, FEATURES, Program, chosen, shrink
from telegrad.testing.simulation import Faults

STALLED = 120.0
"""Seconds of real time for one seed. Its process is killed after that: a thread blocks outside the simulation."""
_BLOCK = 50

Apply = Callable[[], AbstractContextManager[object]]


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


@dataclass(frozen=True)
class SeedResult:
    """The result of one seed."""

    seed: int
    summary: str
    failure: str = ""


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
    """Run seeds in child processes, which are killed if they hang. Results come in any order.

    `apply` is entered in each process around its seeds. With `shrinking`, failing programs are shrunk.
    """
    start = partial(_Process, _Work(dict(features), stalled, apply, shrinking))
    blocks = [range(begin, min(begin + _BLOCK, first + count)) for begin in range(first, first + count, _BLOCK)]
    blocks.reverse()
    running = [start(blocks.pop()) for _ in range(min(processes, len(blocks)))]
    try:
        while running:
            wait([one.connection for one in running], timeout=1.0)
            for one in list(running):
                yield from one.read()
                lost = one.lost()
                if lost is not None:
                    yield lost
                    blocks += [one.left] if one.left else []
                if lost is None and not one.left and blocks:
                    one.give(blocks.pop())
                elif lost is not None or not one.left:
                    one.end()
                    running.remove(one)
                    running += [start(blocks.pop())] if blocks else []
    finally:
        for one in running:
            one.end()


@dataclass(frozen=True)
class _Work:
    """What every child process needs to know."""

    features: Mapping[str, float]
    stalled: float
    apply: Apply
    shrinking: bool


class _Process:
    """A child process that runs seeds."""

    def __init__(self, work: _Work, block: range) -> None:
        spawning = multiprocessing.get_context("spawn")
        self.connection, theirs = spawning.Pipe()
        self._stalled = work.stalled
        self._process = spawning.Process(target=_serve, args=(theirs, work), daemon=True)
        self._process.start()
        theirs.close()
        self._died = False
        self.give(block)
        self._last_message = math.inf  # until it has imported torch

    def give(self, block: range) -> None:
        """Send it seeds to run."""
        self.left = block
        self._last_message = time.monotonic()
        self.connection.send(block)

    def read(self) -> Iterator[SeedResult]:
        """Yield the results that it has sent since the last call."""
        while self.left and self.connection.poll():
            try:
                received: SeedResult | None = self.connection.recv()
            except (EOFError, ConnectionResetError):
                self._died = True
                return
            self._last_message = time.monotonic()
            if received is not None:
                self.left = self.left[1:]
                yield received

    def lost(self) -> SeedResult | None:
        """Return a failure for the current seed if the process died or takes too long."""
        late = time.monotonic() > self._last_message + self._stalled
        if not self.left or not (self._died or late):
            return None
        seed, self.left = self.left[0], self.left[1:]
        why = f"did not finish in {self._stalled:g} s of real time; the stacks of its threads are on stderr"
        return SeedResult(seed, "FAILED", f"seed {seed}: {'its process died' if self._died else why}")

    def end(self) -> None:
        """Kill the process."""
        self.connection.close()
        self._process.kill()
        self._process.join()


def _serve(connection: Connection, work: _Work) -> None:
    logging.getLogger("telegrad").setLevel(logging.CRITICAL)  # injected faults log warnings
    with work.apply():
        connection.send(None)  # ready
        while True:
            try:
                block: range = connection.recv()
            except EOFError:
                return
            for seed in block:
                faulthandler.dump_traceback_later(work.stalled * 0.9)
                connection.send(_result_of(seed, work))
                faulthandler.cancel_dump_traceback_later()


def _result_of(seed: int, work: _Work) -> SeedResult:
    try:
        return SeedResult(seed, run_seed(seed, work.features))
    except BaseException as error:  # noqa: BLE001 - reported with its seed, and the soak continues
        if work.shrinking:
            return SeedResult(seed, "FAILED", f"seed {seed}: {shrunk(seed, work.features)}")
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
    total: Counter[str] = Counter()
    begin = shown = time.monotonic()
    run = partial(run_seeds, processes=options.processes, stalled=options.stalled, shrinking=options.shrink)
    results = run(options.first, options.seeds, features)
    for result in results:
        total[result.summary] += 1
        if result.failure:
            sys.stdout.write(result.failure + "\n")
        if time.monotonic() - shown > 30 or result.failure:
            shown = time.monotonic()
            sys.stdout.write(f"{total.total():,} seeds in {shown - begin:.0f} s: {dict(total)}\n")
            sys.stdout.flush()
        if result.failure and options.stop:
            break
    results.close()
    sys.stdout.write(f"{total.total():,} seeds in {time.monotonic() - begin:.0f} s: {dict(total)}\n")
    return 1 if total["FAILED"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
