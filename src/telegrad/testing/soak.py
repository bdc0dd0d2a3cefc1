"""Runs as many random programs as you like against the oracle: ``make soak SEEDS=10000``.

python -m telegrad.testing.soak --first 0 --seeds 1000 --processes 2 --only inputs,multi_grad
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
from collections.abc import Callable, Iterator, Mapping, Sequence
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
) -> Iterator[Verdict]:
    """Run seeds in processes of their own, so that one that hangs ends with its process. Order is not kept.

    `apply` is entered in each process around its seeds.
    """
    blocks = [range(start, min(start + _BLOCK, first + count)) for start in range(first, first + count, _BLOCK)]
    blocks.reverse()
    running = [_Process(features, stalled, apply, blocks.pop()) for _ in range(min(processes, len(blocks)))]
    try:
        while running:
            wait([one.connection for one in running], timeout=1.0)
            for one in list(running):
                yield from one.read()
                hung = one.hung()
                if hung is not None:
                    yield hung
                if one.left and hung is not None:
                    running.append(_Process(features, stalled, apply, one.left))
                if hung is not None or (not one.left and not blocks):
                    one.end()
                    running.remove(one)
                elif not one.left:
                    one.give(blocks.pop())
            if not running and blocks:
                running = [_Process(features, stalled, apply, blocks.pop())]
    finally:
        for one in running:
            one.end()


class _Process:
    """One process that runs seeds."""

    def __init__(self, features: Mapping[str, float], stalled: float, apply: Apply, block: range) -> None:
        spawning = multiprocessing.get_context("spawn")
        self.connection, theirs = spawning.Pipe()
        self._stalled = stalled
        self._process = spawning.Process(target=_serve, args=(theirs, dict(features), stalled, apply), daemon=True)
        self._process.start()
        theirs.close()
        self.connection.recv()  # it has imported torch
        self.give(block)

    def give(self, block: range) -> None:
        """Have it run these seeds."""
        self.left = block
        self._heard = time.monotonic()
        self.connection.send(block)

    def read(self) -> Iterator[Verdict]:
        """What it has found since."""
        while self.left and self.connection.poll():
            try:
                verdict: Verdict = self.connection.recv()
            except EOFError:
                self._heard = -1e9
                return
            self.left = self.left[1:]
            self._heard = time.monotonic()
            yield verdict

    def hung(self) -> Verdict | None:
        """What to say of the seed that it runs, if that takes too long."""
        if not self.left or time.monotonic() < self._heard + self._stalled:
            return None
        seed, self.left = self.left[0], self.left[1:]
        why = "its process died" if not self._process.is_alive() else f"no end in {self._stalled:.0f} s of real time"
        return Verdict(seed, "FAILED", f"seed {seed}: {why}; where its threads wait is on stderr")

    def end(self) -> None:
        """End the process."""
        self.connection.close()
        self._process.kill()
        self._process.join()


def _serve(connection: Connection, features: Mapping[str, float], stalled: float, apply: Apply) -> None:
    logging.getLogger("telegrad").setLevel(logging.CRITICAL)  # faults are what is wanted here
    with apply():
        connection.send("ready")
        while True:
            try:
                block: range = connection.recv()
            except EOFError:
                return
            for seed in block:
                faulthandler.dump_traceback_later(stalled * 0.9)
                connection.send(_verdict(seed, features))
                faulthandler.cancel_dump_traceback_later()


def _verdict(seed: int, features: Mapping[str, float]) -> Verdict:
    try:
        return Verdict(seed, run_seed(seed, features))
    except BaseException as error:  # noqa: BLE001 - reported with its seed; the soak goes on
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
    parser.add_argument("--stalled", type=float, default=STALLED, help="seconds of real time for one seed")
    options = parser.parse_args(arguments)
    names = [
        None if given is None else [name for name in given.split(",") if name]
        for given in (options.only, options.without)
    ]
    features = chosen(names[0], names[1] or ())
    total: Counter[str] = Counter()
    begin = shown = time.monotonic()
    verdicts = run_seeds(options.first, options.seeds, features, processes=options.processes, stalled=options.stalled)
    for verdict in verdicts:
        total[verdict.summary] += 1
        if verdict.failure:
            sys.stdout.write(verdict.failure + "\n")
        if time.monotonic() - shown > 30 or verdict.failure:
            shown = time.monotonic()
            sys.stdout.write(f"{total.total():,} seeds in {shown - begin:.0f} s: {dict(total)}\n")
            sys.stdout.flush()
        if verdict.failure and options.stop:
            verdicts.close()  # type: ignore[attr-defined]  # a generator
            break
    sys.stdout.write(f"{total.total():,} seeds in {time.monotonic() - begin:.0f} s: {dict(total)}\n")
    return 1 if total["FAILED"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
