"""How the cost of calls and passes grows with the calls of a context and with the tensors of a message.

    python benchmarks/growth.py [--calls 10 100 1000 10000] [--tensors 1 10 100 1000 10000] [--no-torch] [--json FILE]

First, messages with so many tensors are compared with torch's, in processes that take turns (see `tensors.py`), unless
``--no-torch`` is given. For the rest both workers are in one process, and CPU time is counted: other load on the
machine changes it little. Figures are per call, or per tensor, so a flat row means linear cost. The *slope* is the last
figure divided by that at a tenth of its size, and is held against a bound. Python's garbage collector visits every
object of a large context again and again, which is no work of a pass: it is left out, unless ``--with-collector`` is
given.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import tensors
import torch

from telegrad import autograd, rpc
from telegrad.default_agent import acting_as
from telegrad.testing.group import local_group

if TYPE_CHECKING:
    from collections.abc import Iterator

MOST_SLOPE = 1.3
"""The largest allowed growth of the cost per call or tensor when there are ten times as many."""
REPEATS = 3


def double(x: torch.Tensor) -> torch.Tensor:
    """Run on the callee."""
    return x * 2


def double_all(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Run on the callee."""
    return [x * 2 for x in tensors]


@contextmanager
def all_calls(count: int) -> Iterator[Callable[[], object]]:
    """Time a pass over all of `count` parallel calls."""
    leaf = torch.ones(4, requires_grad=True)
    with autograd.context() as context:
        results = [rpc.rpc_sync("b", double, (leaf,)) for _ in range(count)]
        loss = torch.stack(results).sum()
        yield lambda: autograd.backward(context, [loss])
        gradient = autograd.get_gradients(context)[leaf]
        assert torch.equal(gradient, torch.full((4,), 2.0 * count)), gradient


@contextmanager
def one_of_many(count: int) -> Iterator[Callable[[], object]]:
    """Time a pass that uses one of `count` calls."""
    leaf = torch.ones(4, requires_grad=True)
    with autograd.context() as context:
        results = [rpc.rpc_sync("b", double, (leaf,)) for _ in range(count)]
        loss = results[count // 2].sum()
        yield lambda: autograd.backward(context, [loss])
        assert torch.equal(autograd.get_gradients(context)[leaf], torch.full((4,), 2.0))


@contextmanager
def one_of_two_outputs(count: int) -> Iterator[Callable[[], object]]:
    """Time a pass over calls of which each has an output that is not used, which needs the probe."""
    leaf = torch.ones(4, requires_grad=True)
    with autograd.context() as context:
        results = [rpc.rpc_sync("b", double_all, ([leaf, leaf],)) for _ in range(count)]
        loss = torch.stack([first for first, _ in results]).sum()
        yield lambda: autograd.backward(context, [loss])
        assert torch.equal(autograd.get_gradients(context)[leaf], torch.full((4,), 2.0 * count))


@contextmanager
def forward(count: int) -> Iterator[Callable[[], object]]:
    """Time a call with `count` tensors, there and back."""
    leaves = [torch.ones(4, requires_grad=True) for _ in range(count)]
    with autograd.context():
        yield lambda: rpc.rpc_sync("b", double_all, (leaves,))


@contextmanager
def backward(count: int) -> Iterator[Callable[[], object]]:
    """Time the pass over a call with `count` tensors."""
    leaves = [torch.ones(4, requires_grad=True) for _ in range(count)]
    with autograd.context() as context:
        loss = torch.stack(rpc.rpc_sync("b", double_all, (leaves,))).sum()
        yield lambda: autograd.backward(context, [loss])
        assert len(autograd.get_gradients(context)) == count


Case = Callable[[int], AbstractContextManager[Callable[[], object]]]
CALLS: dict[str, Case] = {
    "pass over all calls": all_calls,
    "pass over one of the calls": one_of_many,
    "pass with unused outputs": one_of_two_outputs,
}
TENSORS: dict[str, Case] = {"message, forward": forward, "message, backward": backward}


def measure(case: Case, count: int, *, with_collector: bool = False) -> float:
    """Return the CPU time of one action, in microseconds for each of the `count`; the median of a few."""
    taken = []
    for _ in range(REPEATS):
        with case(count) as action:
            gc.collect()
            if not with_collector:
                gc.freeze()
            begin = time.process_time()
            action()
            taken.append(time.process_time() - begin)
            gc.unfreeze()
    return statistics.median(taken) * 1e6 / count


def table(cases: dict[str, Case], counts: Sequence[int], *, with_collector: bool) -> dict[str, dict[int, float]]:
    """Measure all cases at all sizes, and print them as they come."""
    found: dict[str, dict[int, float]] = {}
    print(f"{'µs of CPU for each of':28}" + "".join(f"{count:>10,}" for count in counts) + f"{'slope':>10}")
    for name, case in cases.items():
        found[name] = {}
        print(f"{name:28}", end="", flush=True)
        for count in counts:
            found[name][count] = measure(case, count, with_collector=with_collector)
            print(f"{found[name][count]:>10.1f}", end="", flush=True)
        slope = slope_of(found[name])
        print(f"{slope:>10.2f}{'' if slope <= MOST_SLOPE else '  more than ' + str(MOST_SLOPE)}")
    return found


def slope_of(figures: dict[int, float]) -> float:
    """Return how much the cost of each grows over the last tenfold.

    >>> slope_of({10: 9.0, 100: 5.0, 1000: 6.0})
    1.2
    """
    sizes = sorted(figures)
    return figures[sizes[-1]] / figures[sizes[-2]] if len(sizes) > 1 else 1.0


def main() -> int:
    """Print the tables; the exit code says whether a slope is above its bound."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, nargs="*", default=[10, 100, 1000, 10_000])
    parser.add_argument("--tensors", type=int, nargs="*", default=list(tensors.SIZES))
    parser.add_argument("--no-torch", action="store_true", help="do not compare messages with torch's")
    parser.add_argument("--with-collector", action="store_true", help="let Python's collector visit the context too")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    against = {} if options.no_torch else tensors.compare(options.tensors, "unix", tensors.BLOCKS)
    if against:
        print(tensors.table(against), end="\n\n")
    torch.set_num_threads(1)
    with local_group(["a", "b"]) as group, acting_as(group["a"]):
        for case in (*CALLS.values(), *TENSORS.values()):
            measure(case, 10)  # warm
        collector = options.with_collector
        found = table(CALLS, options.calls, with_collector=collector)
        found |= table(TENSORS, options.tensors, with_collector=collector)
    if options.json is not None:
        found_all = {**found, "against torch": tensors.as_data(against)}
        options.json.write_text(json.dumps(found_all, indent=2) + "\n")
    return int(any(slope_of(figures) > MOST_SLOPE for figures in found.values()) or not tensors.is_as_fast(against))


if __name__ == "__main__":
    sys.exit(main())
