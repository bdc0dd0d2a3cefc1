"""Compares the first iterations of new processes: 16 MB there and back, and forward and backward with 16 MB.

Other benchmarks warm up until nothing changes any more. Here both systems get new processes for every round, two
iterations to warm up, and eight that count. Page faults of both processes are counted as well: memory that is touched
for the first time costs several times as much as a copy.

python benchmarks/fresh.py [--transport unix|tcp] [--tls] [--rounds N] [--cases hop echo]
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import command
import pairs
import torch
from measure import time_each, time_inside
from pairs import CALLEE, TELEGRAD, TORCH, Case, System, WorkerSpec, join_torch, started

import backward
import calls
from telegrad import rpc as telegrad_rpc

WARM_UP, TIMED = 2, 8
TARGETS = {("hop", "unix"): 0.35, ("hop", "tcp"): 0.7, ("echo", "tcp"): 0.75}
"""The largest allowed ratio to torch's time, without TLS."""


def page_faults() -> int:
    """Return how many page faults this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def join_telegrad(spec: WorkerSpec) -> Any:
    """Join telegrad's group, encrypted only with --tls."""
    options = telegrad_rpc.Options(
        init_method=spec.init_method(),
        transports=(spec.transport,),
        token=spec.token,
        tls=os.environ.get("BENCHMARK_TLS") == "1",
    )
    telegrad_rpc.init_rpc(spec.name, rpc_backend_options=options, **spec.member())
    return telegrad_rpc


def _counted(prepare: Callable[[Any], Any], measure: Callable[[Any, int], list[float]]) -> Case:
    """Return a case whose block ends with the page faults of an iteration, at the caller and at the callee."""

    def run(prepared: tuple[Any, Any], iterations: int) -> list[float]:
        rpc, action = prepared
        if iterations == 1:  # this is how a worker warms up
            return measure(action, WARM_UP)
        before = page_faults(), rpc.rpc_sync(CALLEE, page_faults)
        block = measure(action, iterations)
        after = page_faults(), rpc.rpc_sync(CALLEE, page_faults)
        return [*block, *((last - first) / iterations for first, last in zip(before, after, strict=True))]

    return Case("", TIMED, lambda rpc: (rpc, prepare(rpc)), run)


def _hop(rpc: Any) -> Any:
    return backward._forward_and_backward(backward.Program(rpc, torch.rand(backward.BIG), backward.double))


def _echo(rpc: Any) -> Any:
    tensor = torch.rand(backward.BIG)
    return lambda: rpc.rpc_sync(CALLEE, calls.echo, (tensor,))


CASES = {"hop": _counted(_hop, time_inside), "echo": _counted(_echo, time_each)}
SYSTEMS = {TORCH: System(join_torch), TELEGRAD: System(join_telegrad)}


@dataclass
class Figures:
    """What the processes of one system took, over all rounds."""

    seconds: list[float] = field(default_factory=list)
    medians: list[float] = field(default_factory=list)
    faults: list[tuple[float, float]] = field(default_factory=list)

    def add(self, block: list[float]) -> None:
        """Add the block of one pair of processes."""
        *seconds, at_caller, at_callee = block
        self.seconds += seconds
        self.medians.append(statistics.median(seconds))
        self.faults.append((at_caller, at_callee))

    def row(self) -> list[str]:
        """Return median and range of processes in ms, and page faults at caller and callee."""
        spread = f"{min(self.medians) * 1e3:.1f} to {max(self.medians) * 1e3:.1f}"
        faults = [f"{statistics.median(found):,.0f}" for found in zip(*self.faults, strict=True)]
        return [f"{statistics.median(self.seconds) * 1e3:.1f}", spread, *faults]


def compare(case: str, transport: str, rounds: int) -> dict[str, Figures]:
    """Measure a case in new processes, each time in the opposite order."""
    found = {system: Figures() for system in SYSTEMS}
    order = list(SYSTEMS)
    for _ in range(rounds):
        for system in order:
            with started({system: SYSTEMS[system]}, CASES, transport) as ready:
                found[system].add(ready[system].run(case, TIMED))
        order.reverse()
    return found


def main() -> int:
    """Run the comparison, and print a table."""
    parser = argparse.ArgumentParser(description="Compare the first iterations of new processes.")
    parser.add_argument("--transport", choices=command.TRANSPORTS, default="unix")
    parser.add_argument("--tls", action="store_true", help="encrypt telegrad's connections (tcp)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cases", nargs="+", choices=tuple(CASES), default=list(CASES))
    options = parser.parse_args()
    os.environ["BENCHMARK_TLS"] = str(int(options.tls))  # for the workers, which are forked
    pairs.WARM_UP = 0.0  # not longer than once
    with command.reporting_errors("fresh.py") as end:
        for case in options.cases:
            found = compare(case, options.transport, options.rounds)
            ratio = statistics.median(found[TELEGRAD].seconds) / statistics.median(found[TORCH].seconds)
            target = TARGETS.get((case, options.transport))
            print(f"{case}, {options.transport}: {ratio:.2f} of torch", f"(at most {target})" if target else "")
            for system, figures in found.items():
                median, spread, caller, callee = figures.row()
                print(f"  {system:9} {median} ms (processes {spread}); page faults {caller} and {callee}", flush=True)
    return end.code


if __name__ == "__main__":
    # Imported under its own name: the other side finds remote functions by module name.
    import fresh

    sys.exit(fresh.main())
