"""Compares messages with many tensors: torch's RPC and autograd, and telegrad's, in turn.

    python benchmarks/tensors.py [--tensors 1 10 100 1000 10000] [--transport unix|tcp] [--blocks N] [--json FILE]

A call in a context takes a list of small tensors that require grad and returns as many; its pass takes their gradients
the same way. Times are per tensor, so a flat row means linear cost. The ratio at `HELD_AT` tensors is held against a
target. `growth.py` prints this as well.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from measure import Comparison, alternate, columns, is_met, time_inside
from pairs import (
    CALLEE,
    TELEGRAD,
    TORCH,
    Action,
    BenchmarkError,
    Case,
    System,
    join_telegrad,
    join_torch,
    started,
)
from torch.distributed import autograd as torch_autograd
from torch.distributed import rpc as torch_rpc

from telegrad import autograd as telegrad_autograd

SIZES = (1, 10, 100, 1000, 10_000)
HELD_AT, TARGET = 1000, 0.7
"""So many tensors in a message take at most this share of torch's time, in both directions."""
ELEMENTS = 4
BLOCKS = 8
PER_BLOCK = 3000
"""Tensors in a block, so that blocks of all sizes take about as long; at least two messages."""

Setup = Callable[[], AbstractContextManager[Action]]
Figures = dict[str, dict[int, Comparison]]


def double_all(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Run on the callee."""
    return [x * 2 for x in tensors]


class Program:
    """A call with many tensors, and the pass over it."""

    def __init__(self, count: int, rpc: Any) -> None:
        self._autograd: Any = torch_autograd if rpc is torch_rpc else telegrad_autograd
        self._rpc = rpc
        self._leaves = [torch.rand(ELEMENTS, requires_grad=True) for _ in range(count)]
        # The gradient of a plain sum is an expanded scalar, and torch would send only the scalar. Real losses differ.
        self._slope = torch.rand(count * ELEMENTS)

    def _loss(self) -> torch.Tensor:
        results = self._rpc.rpc_sync(CALLEE, double_all, (self._leaves,))
        return torch.dot(torch.stack(results).flatten(), self._slope)

    @contextlib.contextmanager
    def forward(self) -> Iterator[Action]:
        """Time the call."""
        with self._autograd.context():
            yield lambda: self._rpc.rpc_sync(CALLEE, double_all, (self._leaves,))

    @contextlib.contextmanager
    def backward(self) -> Iterator[Action]:
        """Time the pass."""
        with self._autograd.context() as context:
            loss = self._loss()
            yield lambda: self._autograd.backward(context, [loss])

    def check(self) -> None:
        """Raise if a gradient differs from that of one process."""
        expected = 2 * self._slope.view(-1, ELEMENTS)
        with self._autograd.context() as context:
            self._autograd.backward(context, [self._loss()])
            found = self._autograd.get_gradients(context)
            if not torch.allclose(torch.stack([found[leaf] for leaf in self._leaves]), expected):
                raise BenchmarkError("a pass gave wrong gradients: its time means nothing")


def _prepare(direction: str, count: int, rpc: Any) -> Setup:
    program = Program(count, rpc)
    program.check()
    setup: Setup = getattr(program, direction)
    return setup


def cases(sizes: Sequence[int]) -> dict[str, dict[int, Case]]:
    """Return a case for each direction and size."""
    return {
        direction: {
            count: Case(
                f"{count:,} tensors, {direction}",
                max(2, PER_BLOCK // count),
                partial(_prepare, direction, count),
                time_inside,
            )
            for count in sizes
        }
        for direction in ("forward", "backward")
    }


def compare(sizes: Sequence[int], transport: str, blocks: int) -> Figures:
    """Measure all sizes in both directions."""
    systems = {TORCH: System(join_torch), TELEGRAD: System(join_telegrad)}
    found: Figures = {}
    directions = cases(sizes)
    by_name = {case.what: case for of_direction in directions.values() for case in of_direction.values()}
    with started(systems, by_name, transport) as workers:
        for direction, of_direction in directions.items():
            found[direction] = {}
            for count, case in of_direction.items():
                runs = {name: each.runs(case.what, case.iterations) for name, each in workers.items()}
                series = alternate(runs, blocks)
                found[direction][count] = Comparison(case.what, case.what, series[TORCH], series[TELEGRAD])
    return found


def slope(of_direction: dict[int, Comparison]) -> float:
    """Return how much telegrad's time for each tensor grows over the last tenfold."""
    sizes = sorted(of_direction)
    last = [of_direction[size].candidate.median() / size for size in sizes[-2:]]
    return last[-1] / last[0]


def is_as_fast(found: Figures) -> bool:
    """Whether messages of `HELD_AT` tensors, if they were measured, meet the target in both directions."""
    return all(
        is_met(of_direction[HELD_AT].ratio(), TARGET) for of_direction in found.values() if HELD_AT in of_direction
    )


def table(found: Figures) -> str:
    """Return the figures as text."""
    rows = [["µs for each tensor of", "tensors", TORCH, TELEGRAD, "ratio", "of block pairs", "at most"]]
    for direction, of_direction in found.items():
        for count, case in of_direction.items():
            pairs = case.pair_ratios()
            met = ""
            if count == HELD_AT:
                met = f"{TARGET} " + ("met" if is_met(case.ratio(), TARGET) else "NOT MET")
            rows.append(
                [
                    f"a message, {direction}",
                    f"{count:,}",
                    *(f"{series.median() * 1e6 / count:.1f}" for series in (case.baseline, case.candidate)),
                    f"{case.ratio():.2f}",
                    f"{min(pairs):.2f} to {max(pairs):.2f}",
                    met,
                ]
            )
        rows.append([f"slope, {direction}", "", "", f"{slope(of_direction):.2f}", "", "", ""])
    return "\n".join(columns(rows, left=(0, 6)))


def main() -> int:
    """Print the table; the exit code says whether the target is met."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensors", type=int, nargs="*", default=list(SIZES))
    parser.add_argument("--transport", choices=("unix", "tcp"), default="unix")
    parser.add_argument("--blocks", type=int, default=BLOCKS)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    found = compare(options.tensors, options.transport, options.blocks)
    print(table(found))
    if options.json is not None:
        options.json.write_text(json.dumps(as_data(found), indent=2) + "\n")
    return int(not is_as_fast(found))


def as_data(found: Figures) -> dict[str, dict[int, dict[str, float]]]:
    """Return the medians in seconds, and the ratios."""
    return {
        direction: {
            count: {TORCH: case.baseline.median(), TELEGRAD: case.candidate.median(), "ratio": case.ratio()}
            for count, case in of_direction.items()
        }
        for direction, of_direction in found.items()
    }


if __name__ == "__main__":
    # Imported under its own name: the other side finds remote functions by module name.
    import tensors

    sys.exit(tensors.main())
