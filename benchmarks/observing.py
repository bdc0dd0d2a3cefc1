"""Measures what the event stream costs: a no-op call and a backward hop, with it on and off, in turn in one run.

Both workers switch together, so all else is the same. The largest allowed ratio is 1.03.

python benchmarks/observing.py [--blocks N] [--iterations N] [--json FILE]
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from measure import Block, alternate, time_each

from telegrad import autograd, launch, rpc
from telegrad.default_agent import default_agent

CALLER, CALLEE = "caller", "callee"
MOST = 1.03


def noop() -> None:
    """Do nothing."""


def double(x: torch.Tensor) -> torch.Tensor:
    """Do almost nothing."""
    return x * 2


def switch(on: bool) -> None:
    """Switch the event stream of this worker."""
    default_agent().local.events.on = on


def call() -> None:
    """Make a call that does nothing."""
    rpc.rpc_sync(CALLEE, noop)


def hop() -> None:
    """Make a call in a context, and run the backward pass through both workers."""
    with autograd.context() as context:
        autograd.backward(context, [rpc.rpc_sync(CALLEE, double, (torch.ones(8, requires_grad=True),)).sum()])


def measure(blocks: int, iterations: int) -> dict[str, dict[str, list[Block]]]:
    """Run on the caller, and return the times of all blocks."""
    if rpc.get_worker_info().name != CALLER:
        return {}

    def run(action: Callable[[], None], on: bool) -> Block:
        switch(on)
        rpc.rpc_sync(CALLEE, switch, (on,))
        time_each(action, iterations // 10)
        return time_each(action, iterations)

    measured: dict[str, dict[str, list[Block]]] = {}
    for name, action, share in (("noop", call, iterations), ("hop", hop, iterations // 4)):
        iterations = share
        systems = {"off": lambda: run(action, False), "on": lambda: run(action, True)}  # noqa: B023 - called in this turn
        measured[name] = {kind: list(series.blocks) for kind, series in alternate(systems, blocks).items()}
    return measured


def main() -> int:
    """Print a table, and return 0 if the targets are met."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=300)
    parser.add_argument("--iterations", type=int, default=200, help="calls in a block; a quarter as many hops")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found = launch.local(measure, [CALLER, CALLEE], (options.blocks, options.iterations))[0]
    results, met = {}, True
    for case, series in found.items():
        medians = {kind: statistics.median(itertools.chain.from_iterable(blocks)) for kind, blocks in series.items()}
        pairs = [
            statistics.median(on) / statistics.median(off) for on, off in zip(series["on"], series["off"], strict=True)
        ]
        ratio = statistics.median(pairs)  # of neighbouring blocks, because the machine's speed changes
        quartiles = statistics.quantiles(pairs, n=4) if len(pairs) > 1 else [ratio] * 3
        results[case] = {"off": medians["off"], "on": medians["on"], "ratio": ratio}
        met = met and ratio <= MOST
        print(
            f"{case:5} off {medians['off'] * 1e6:8.1f} µs   on {medians['on'] * 1e6:8.1f} µs   ratio of block pairs "
            f"{ratio:.3f} (quartiles {quartiles[0]:.3f} to {quartiles[2]:.3f}), at most {MOST}"
        )
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=2) + "\n")
    return 0 if met else 1


if __name__ == "__main__":
    # Imported under its own name: functions of __main__ would be sent by value, which takes as long as the call.
    import observing

    sys.exit(observing.main())
