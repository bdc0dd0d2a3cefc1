"""Measures what the event stream costs: a no-op call and a backward hop, with it on and off, in turn in one run.

Both workers switch together, so all else is the same. Their rings are full, as after the first 8192 events of any
worker: until then each event takes fresh memory, and a no-op shows 1.035. The largest allowed ratio is 1.03. `make
bench` runs this, too.

python benchmarks/observing.py [--transports unix tcp] [--blocks N] [--quick] [--json FILE]
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import command
import torch
from measure import Block, alternate, columns, time_each

from telegrad import autograd, launch, rpc
from telegrad.default_agent import default_agent
from telegrad.events import DEFAULT_SIZE

PROGRAM = "observing.py"
CALLER, CALLEE = "caller", "callee"
MOST = 1.03
ROUNDS = 5
"""How often both processes are restarted: where their memory lies changes how fast they are."""
BLOCKS = 180
"""How many blocks of each kind there are in a round. They are short, because the machine's speed changes."""


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


CASES: dict[str, tuple[Callable[[], None], int]] = {"noop": (call, 100), "hop1": (hop, 25)}
"""What runs, and how often in a block."""


def take_turns(case: str, blocks: int) -> list[tuple[Block, Block]]:
    """Run on both workers. The caller returns pairs of neighbouring blocks, without and with events."""
    if rpc.get_worker_info().name != CALLER:
        return []
    action, iterations = CASES[case]
    switch(True)
    rpc.rpc_sync(CALLEE, switch, (True,))
    for _ in range(DEFAULT_SIZE):  # without breaks, so that what it holds lies in memory as it does in any program
        call()

    def run(on: bool) -> Block:
        switch(on)
        rpc.rpc_sync(CALLEE, switch, (on,))
        time_each(action, iterations // 10)
        return time_each(action, iterations)

    series = alternate({"off": lambda: run(False), "on": lambda: run(True)}, blocks)
    return list(zip(series["off"].blocks, series["on"].blocks, strict=True))


def measure(transport: str, cases: Sequence[str], blocks: int, rounds: int) -> dict[str, dict[str, Any]]:
    """Return the medians and the ratio of each case."""
    found = {}
    for case in cases:
        pairs: list[tuple[Block, Block]] = []
        for _ in range(rounds):
            options = {"rpc_backend_options": rpc.Options(transports=(transport,))}
            pairs += launch.local(take_turns, [CALLER, CALLEE], (case, blocks), init_options=options)[0]
        ratios = [statistics.median(on) / statistics.median(off) for off, on in pairs]
        off, on = (statistics.median(itertools.chain.from_iterable(side)) for side in zip(*pairs, strict=True))
        quartiles = statistics.quantiles(ratios, n=4)
        found[case] = {"off": off, "on": on, "ratio": statistics.median(ratios), "quartiles": quartiles[::2]}
    return found


def text(transport: str, found: Mapping[str, Mapping[str, Any]]) -> str:
    """Return a table."""
    head = [transport, "off", "on", "ratio", "at most", "met", "quartiles"]
    rows = [
        [
            case,
            f"{one['off'] * 1e6:.1f}",
            f"{one['on'] * 1e6:.1f}",
            f"{one['ratio']:.3f}",
            f"{MOST:.2f}",
            "yes" if is_met(one["ratio"]) else "NO",
            " to ".join(f"{quartile:.3f}" for quartile in one["quartiles"]),
        ]
        for case, one in found.items()
    ]
    below = "Times in µs with the event stream off and on, medians. Ratio: median of neighbouring blocks, on / off."
    return "\n".join([*columns([head, *rows]), "", below])


def is_met(ratio: float) -> bool:
    """Whether the stream costs no more than it may."""
    return ratio <= MOST


def main() -> int:
    """Print a table for each transport, and return 0 if the bound is met everywhere."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transports", nargs="+", choices=command.TRANSPORTS, default=command.TRANSPORTS)
    parser.add_argument("--blocks", type=command.at_least_one, default=BLOCKS, help="in each round (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="run a few blocks, to see that it works")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to this file")
    options = parser.parse_args()
    results = {}
    for transport in options.transports:
        blocks, rounds = (2, 1) if options.quick else (options.blocks, ROUNDS)
        results[transport] = measure(transport, tuple(CASES), blocks, rounds)
        print(text(transport, results[transport]), end="\n\n", flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=1) + "\n")
    return 0 if all(is_met(one["ratio"]) for found in results.values() for one in found.values()) else 1


if __name__ == "__main__":
    # Imported under its own name: functions of __main__ would be sent by value, which takes as long as the call.
    import observing

    sys.exit(observing.main())
