"""Runs as many random programs as you like against the oracle: ``make soak SEEDS=10000``.

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

from telegrad.testing.backward import Checked, check_programs, draw_programs
from telegrad.testing.programs import FEATURES, Program, chosen, shrink
from telegrad.testing.simulation import Faults

STALLED = 120.0
"""Seconds of real time for one seed, after which its process is ended: a thread waits for something real."""
_BLOCK = 50

Apply = Callable[[], AbstractContextManager[object]]


def run_seed(seed: int, features: Mapping[str, float] = FEATURES) -> str:
    """Run one seed as the soak does: some with two programs at once, some with faults, some as on one host."""
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
    """What is left of a seed that fails when all is taken out that it fails without, and how it fails."""
    programs = draw_programs(seed, _together(seed), features)
    last = "it does not fail"

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
class Verdict:
    """How one seed went."""

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
) -> Generator[Verdict, None, None]:
    """Run seeds in processes of their own, so that one that hangs ends with its process. Order is not kept.

    `apply` is entered in each process around its seeds. With `shrinking`, failures show programs made smaller.
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
    """What processes are told."""

    features: Mapping[str, float]
    stalled: float
    apply: Apply
    shrinking: bool


class _Process:
    """One process that runs seeds."""

    def __init__(self, work: _Work, block: range) -> None:
        spawning = multiprocessing.get_context("spawn")
        self.connection, theirs = spawning.Pipe()
        self._stalled = work.stalled
        self._process = spawning.Process(target=_serve, args=(theirs, work), daemon=True)
        self._process.start()
        theirs.close()
        self._died = False
        self.give(block)
        self._heard = math.inf  # until it has imported torch

    def give(self, block: range) -> None:
        """Have it run these seeds."""
        self.left = block
        self._heard = time.monotonic()
        self.connection.send(block)

    def read(self) -> Iterator[Verdict]:
        """What it has found since."""
        while self.left and self.connection.poll():
            try:
                said: Verdict | None = self.connection.recv()
            except (EOFError, ConnectionResetError):
                self._died = True
                return
            self._heard = time.monotonic()
            if said is not None:
                self.left = self.left[1:]
                yield said

    def lost(self) -> Verdict | None:
        """What to say of the seed that it runs, if that has killed it or takes too long."""
        late = time.monotonic() > self._heard + self._stalled
        if not self.left or not (self._died or late):
            return None
        seed, self.left = self.left[0], self.left[1:]
        why = f"no end in {self._stalled:g} s of real time; where its threads wait is on stderr"
        return Verdict(seed, "FAILED", f"seed {seed}: {'its process died' if self._died else why}")

    def end(self) -> None:
        """End the process."""
        self.connection.close()
        self._process.kill()
        self._process.join()


def _serve(connection: Connection, work: _Work) -> None:
    logging.getLogger("telegrad").setLevel(logging.CRITICAL)  # faults are what is wanted here
    with work.apply():
        connection.send(None)  # ready
        while True:
            try:
                block: range = connection.recv()
            except EOFError:
                return
            for seed in block:
                faulthandler.dump_traceback_later(work.stalled * 0.9)
                connection.send(_verdict(seed, work))
                faulthandler.cancel_dump_traceback_later()


def _verdict(seed: int, work: _Work) -> Verdict:
    try:
        return Verdict(seed, run_seed(seed, work.features))
    except BaseException as error:  # noqa: BLE001 - reported with its seed; the soak goes on
        if work.shrinking:
            return Verdict(seed, "FAILED", f"seed {seed}: {shrunk(seed, work.features)}")
        return Verdict(seed, "FAILED", f"seed {seed}: {''.join(traceback.format_exception(error))}")


def main(arguments: list[str] | None = None) -> int:
    """Run the soak; 1 if a seed failed."""
    parser = argparse.ArgumentParser(description="Random distributed programs against one-process autograd.")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--seeds", type=int, default=1000, help="how many")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--only", help=f"features, each in every program: {', '.join(FEATURES)}")
    parser.add_argument("--without", help="features that no program has")
    parser.add_argument("--stop", action="store_true", help="stop at the first failure")
    parser.add_argument("--shrink", action="store_true", help="show what is left of a failing seed when it is shrunk")
    parser.add_argument("--stalled", type=float, default=STALLED, help="seconds of real time for one seed")
    options = parser.parse_args(arguments)
    names = [
        None if given is None else [name for name in given.split(",") if name]
        for given in (options.only, options.without)
    ]
    features = chosen(names[0], names[1] or ())
    total: Counter[str] = Counter()
    begin = shown = time.monotonic()
    run = partial(run_seeds, processes=options.processes, stalled=options.stalled, shrinking=options.shrink)
    verdicts = run(options.first, options.seeds, features)
    for disposition in verdicts:
        total[disposition.summary] += 1
        if disposition.failure:
            sys.stdout.write(disposition.failure + "\n")
        if time.monotonic() - shown > 30 or disposition.failure:
            shown = time.monotonic()
            sys.stdout.write(f"{total.total():,} seeds in {shown - begin:.0f} s: {dict(total)}\n")
            sys.stdout.flush()
        if disposition.failure and options.stop:
            break
    verdicts.close()
    sys.stdout.write(f"{total.total():,} seeds in {time.monotonic() - begin:.0f} s: {dict(total)}\n")
    return 1 if total["FAILED"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
