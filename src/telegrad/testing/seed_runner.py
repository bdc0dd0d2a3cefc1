"""Runs many seeds in child processes, which are killed if they hang, and reports failures."""

from __future__ import annotations

import faulthandler
import logging
import math
import multiprocessing
import sys
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection, wait

STALLED = 120.0
"""Seconds of real time for one seed. Its process is killed after that: a thread blocks outside the simulation."""
_BLOCK = 50

Apply = Callable[[], AbstractContextManager[object]]


@dataclass(frozen=True)
class SeedResult:
    """The result of one seed."""

    seed: int
    summary: str
    failure: str = ""


RunSeed = Callable[[int], SeedResult]
"""Runs one seed. It reports every error in its result."""


def run_seeds(
    first: int,
    count: int,
    run_seed: RunSeed,
    *,
    processes: int = 2,
    stalled: float = STALLED,
    apply: Apply = nullcontext,
) -> Generator[SeedResult, None, None]:
    """Run seeds in child processes, which are killed if they hang. Results come in any order.

    `apply` is entered in each process around its seeds.
    """
    start = partial(_Process, _Work(run_seed, stalled, apply))
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

    run_seed: RunSeed
    stalled: float
    apply: Apply


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
                connection.send(work.run_seed(seed))
                faulthandler.cancel_dump_traceback_later()


def report(results: Generator[SeedResult, None, None], *, stop: bool = False) -> int:
    """Print failures, and counts every 30 seconds and at the end. Return 1 if a seed failed, for a command."""
    total: Counter[str] = Counter()
    begin = shown = time.monotonic()
    for result in results:
        total[result.summary] += 1
        if result.failure:
            sys.stdout.write(result.failure + "\n")
        if time.monotonic() - shown > 30 or result.failure:
            shown = time.monotonic()
            sys.stdout.write(f"{total.total():,} seeds in {shown - begin:.0f} s: {dict(total)}\n")
            sys.stdout.flush()
        if result.failure and stop:
            break
    results.close()
    sys.stdout.write(f"{total.total():,} seeds in {time.monotonic() - begin:.0f} s: {dict(total)}\n")
    return 1 if total["FAILED"] else 0
