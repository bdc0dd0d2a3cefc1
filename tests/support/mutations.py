"""Mutations of the engine, at least one for each feature of random programs.

Each removes something that a feature tests. `tests/behaviour/autograd/test_mutations.py` checks that
each is found within 500 seeds. To print how many seeds each takes:

python tests/support/mutations.py
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import torch

from telegrad.backward import engine_call, extension, grad_slots, inputs, islands, watched_engine
from telegrad.backward.nodes import receive
from telegrad.calls import client
from telegrad.testing.programs import chosen
from telegrad.testing.soak import STALLED, SeedResult, run_seeds
from telegrad.wire import payload, tensor_encode

Patch = Callable[[], contextlib.AbstractContextManager[object]]
MOST_SEEDS = 500


@dataclass(frozen=True)
class Mutation:
    """A patch that breaks something, and the features that find it."""

    features: tuple[str, ...]
    patch: Patch
    hangs: bool = False
    """A thread waits for a lock of `threading`, so a seed that finds the mutation never ends."""


def _instead(owner: Any, name: str, other: Any) -> Patch:
    return partial(mock.patch.object, owner, name, other)


def _all_branches_run() -> contextlib.AbstractContextManager[object]:
    """Make a pass with inputs run everything that its roots reach."""
    plan = islands.plan
    stack = contextlib.ExitStack()
    stack.enter_context(mock.patch.object(islands, "plan", lambda *args, needed=None, **kwargs: plan(*args, **kwargs)))
    stack.enter_context(mock.patch.object(inputs.Needs, "leading", lambda self, reached: reached))
    return stack


@contextlib.contextmanager
def _nothing_captured(tensors: Any) -> Iterator[dict[int, Any]]:
    yield {}


def _receive_views_apart(recv: Any, propagate: Any, tensors: Any, *anchor: Any) -> Any:
    return receive(recv, propagate, [tensor.detach().clone() for tensor in tensors], *anchor)


@contextlib.contextmanager
def _inner_gradients_into_grad() -> Iterator[None]:
    run_backward = watched_engine.run_backward
    with mock.patch.object(
        watched_engine.WatchedEngine, "run_backward", lambda self, *args, **kwargs: run_backward(*args, **kwargs)
    ):
        yield


@contextlib.contextmanager
def _hooks_under_locks() -> Iterator[None]:
    """Make a thread that installs a gradient in .grad hold a lock of the leaf, even while its hooks wait."""
    locks: dict[int, threading.Lock] = defaultdict(threading.Lock)

    def add(self: grad_slots.Slots, part: grad_slots.Part, wait: grad_slots.Wait) -> None:
        for key in sorted(part.leaf_ids()):
            locks[key].acquire()
        part.install()

    def remove(self: grad_slots.Slots, part: grad_slots.Part) -> None:
        part.uninstall()
        for key in part.leaf_ids():
            locks[key].release()

    with mock.patch.object(grad_slots.Slots, "add", add), mock.patch.object(grad_slots.Slots, "remove", remove):
        yield


@contextlib.contextmanager
def _no_grad_dtype() -> Iterator[None]:
    """Hide grad_dtype from Python code, but not from torch's engine."""
    real = torch.Tensor.grad_dtype
    blind = property(lambda leaf: None, lambda leaf, dtype: real.__set__(leaf, dtype))
    with mock.patch.object(torch.Tensor, "grad_dtype", blind):
        yield


@contextlib.contextmanager
def _two_dtypes_apart() -> Iterator[None]:
    """Make tensors that overlap share memory on arrival only if they have the same dtype."""
    real = tensor_encode.overlapping

    def overlapping(pieces: Any, tensors: Any) -> Any:
        groups = real(pieces, tensors)
        return [group for group in groups if len({tensors[index].dtype for *_, index in group}) == 1]

    with mock.patch.object(tensor_encode, "overlapping", overlapping):
        yield


MUTATIONS: dict[str, Mutation] = {
    "inputs: branches without inputs run": Mutation(("inputs",), _all_branches_run),
    "inputs: gradients of inputs without their hooks": Mutation(
        ("inputs",), _instead(engine_call, "capturing", _nothing_captured)
    ),
    "passes: branches without inputs are freed": Mutation(("inputs", "passes"), _all_branches_run),
    "grad_modes: subclasses under no_grad without history": Mutation(
        ("subclasses", "grad_modes"), _instead(payload, "reduce_with_history", lambda reduce, x: reduce(x))
    ),
    "subclasses: sent although pickling drops the history": Mutation(
        ("subclasses",), _instead(payload, "check_keeps_history", lambda x, reduced: None)
    ),
    "subclasses: torch's own pickling is not recognized": Mutation(
        ("subclasses",), _instead(payload, "standard_reduction", lambda x, reduced: None)
    ),
    "views: overlapping tensors arrive separately": Mutation(
        ("views",), _instead(extension, "receive_views", _receive_views_apart)
    ),
    "reentrant: inner gradients go into .grad": Mutation(("reentrant",), _inner_gradients_into_grad),
    "multi_grad: hooks do not tie islands": Mutation(("multi_grad",), _instead(islands, "ties", ())),
    "post_accumulate: hooks run under locks": Mutation(("post_accumulate",), _hooks_under_locks, hangs=True),
    "grad_dtype: ignored without the engine": Mutation(("grad_dtype",), _no_grad_dtype),
    "dtypes: overlapping tensors of two dtypes arrive separately": Mutation(("dtypes", "views"), _two_dtypes_apart),
    "autocast: calls do not carry it": Mutation(("autocast",), _instead(client, "autocast_is_enabled", lambda: False)),
}


def applied(name: str) -> contextlib.AbstractContextManager[object]:
    """Return a context manager that applies one mutation."""
    return MUTATIONS[name].patch()


def found(name: str, most: int = MOST_SEEDS) -> SeedResult | None:
    """The first seed that shows it, with how; None if none of so many does."""
    mutation = MUTATIONS[name]
    run = partial(run_seeds, processes=1, stalled=10.0 if mutation.hangs else STALLED, apply=partial(applied, name))
    results = run(0, most, chosen(mutation.features))
    with contextlib.closing(results):
        for result in results:
            if result.failure:
                return result
    return None


def main() -> None:
    """Print how many seeds each mutation takes, and what the last of them found."""
    for name in MUTATIONS:
        if any(part in name for part in sys.argv[1:] or [""]):
            result = found(name)
            if result is None:
                print(f"NOT FOUND  {name}")
            else:
                lines = result.failure.splitlines()
                shown = [line for line in lines if "Different:" in line] or lines[-1:]
                print(f"{result.seed + 1:>9}  {name}: {shown[-1][:160]}", flush=True)


if __name__ == "__main__":
    main()
