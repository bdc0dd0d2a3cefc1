"""Mutations of the engine, one or more for each feature of random programs: what a feature guards, taken out.

A feature earns its place by finding them: `test_mutations.py` sees to it that each is found within 500 seeds. Counts:

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

from telegrad.backward import extension as record
from telegrad.backward import grad_slots as slots
from telegrad.backward import graph as engine
from telegrad.backward import inputs, islands, watched_engine
from telegrad.backward.nodes import receive
from telegrad.calls import client as calling
from telegrad.testing.programs import chosen
from telegrad.testing.soak import STALLED, Verdict, run_seeds
from telegrad.wire import payload
from telegrad.wire import tensor_encode as layout

Patch = Callable[[], contextlib.AbstractContextManager[object]]
MOST_SEEDS = 500


@dataclass(frozen=True)
class Mutation:
    """What is taken out, and the features that show it."""

    features: tuple[str, ...]
    patch: Patch
    hangs: bool = False
    """A thread waits for a lock of `threading`, so a seed that finds it never ends."""


def _instead(owner: Any, name: str, other: Any) -> Patch:
    return partial(mock.patch.object, owner, name, other)


def _all_branches_run() -> contextlib.AbstractContextManager[object]:
    """A pass with inputs runs all that its roots reach."""
    plan = islands.plan
    stack = contextlib.ExitStack()
    stack.enter_context(mock.patch.object(islands, "plan", lambda *args, needed=None, **kwargs: plan(*args, **kwargs)))
    stack.enter_context(mock.patch.object(inputs.Needs, "leading", lambda self, reached: reached))
    return stack


@contextlib.contextmanager
def _nothing_noted(tensors: Any) -> Iterator[dict[int, Any]]:
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
    """Who installs a gradient in .grad has a lock of the leaf until it is done, whatever its hooks wait for."""
    locks: dict[int, threading.Lock] = defaultdict(threading.Lock)

    def add(self: slots.Slots, part: slots.Part, wait: slots.Wait) -> None:
        for key in sorted(part.leaf_ids()):
            locks[key].acquire()
        part.install()

    def remove(self: slots.Slots, part: slots.Part) -> None:
        part.put_back()
        for key in part.leaf_ids():
            locks[key].release()

    with mock.patch.object(slots.Slots, "add", add), mock.patch.object(slots.Slots, "remove", remove):
        yield


@contextlib.contextmanager
def _no_grad_dtype() -> Iterator[None]:
    """Python code sees no grad_dtype; torch's engine does."""
    real = torch.Tensor.grad_dtype
    blind = property(lambda leaf: None, lambda leaf, dtype: real.__set__(leaf, dtype))
    with mock.patch.object(torch.Tensor, "grad_dtype", blind):
        yield


@contextlib.contextmanager
def _two_dtypes_apart() -> Iterator[None]:
    """Tensors that overlap share memory on arrival only if they are of one dtype."""
    real = layout.overlapping

    def overlapping(pieces: Any, tensors: Any) -> Any:
        groups = real(pieces, tensors)
        return [group for group in groups if len({tensors[index].dtype for *_, index in group}) == 1]

    with mock.patch.object(layout, "overlapping", overlapping):
        yield


MUTATIONS: dict[str, Mutation] = {
    "inputs: branches that lead nowhere run": Mutation(("inputs",), _all_branches_run),
    "inputs: gradients of inputs without their hooks": Mutation(
        ("inputs",), _instead(engine, "noting", _nothing_noted)
    ),
    "passes: branches that lead nowhere are freed": Mutation(("inputs", "passes"), _all_branches_run),
    "grad_modes: subclasses under no_grad without history": Mutation(
        ("subclasses", "grad_modes"), _instead(payload, "reduce_with_history", lambda reduce, x: reduce(x))
    ),
    "subclasses: one that leaves its history out is sent": Mutation(
        ("subclasses",), _instead(payload, "check_keeps_history", lambda x, reduced: None)
    ),
    "subclasses: torch's own pickling is not seen": Mutation(
        ("subclasses",), _instead(payload, "standard_reduction", lambda x, reduced: None)
    ),
    "views: tensors that overlap arrive apart": Mutation(
        ("views",), _instead(record, "receive_views", _receive_views_apart)
    ),
    "reentrant: inner gradients go into .grad": Mutation(("reentrant",), _inner_gradients_into_grad),
    "multi_grad: hooks do not tie islands": Mutation(("multi_grad",), _instead(islands, "ties", ())),
    "post_accumulate: hooks run under locks": Mutation(("post_accumulate",), _hooks_under_locks, hangs=True),
    "grad_dtype: the short way does not look at it": Mutation(("grad_dtype",), _no_grad_dtype),
    "dtypes: overlapping tensors of two dtypes arrive apart": Mutation(("dtypes", "views"), _two_dtypes_apart),
    "autocast: calls do not carry it": Mutation(("autocast",), _instead(calling, "autocast_is_enabled", lambda: False)),
}


def applied(name: str) -> contextlib.AbstractContextManager[object]:
    """The engine with one mutation."""
    return MUTATIONS[name].patch()


def found(name: str, most: int = MOST_SEEDS) -> Verdict | None:
    """The first seed that shows it, with how; None if none of so many does."""
    mutation = MUTATIONS[name]
    run = partial(run_seeds, processes=1, stalled=10.0 if mutation.hangs else STALLED, apply=partial(applied, name))
    verdicts = run(0, most, chosen(mutation.features))
    with contextlib.closing(verdicts):
        for verdict in verdicts:
            if verdict.failure:
                return verdict
    return None


def main() -> None:
    """Print how many seeds each takes, and what the last of them showed."""
    for name in MUTATIONS:
        if any(part in name for part in sys.argv[1:] or [""]):
            verdict = found(name)
            if verdict is None:
                print(f"NOT FOUND  {name}")
            else:
                lines = verdict.failure.splitlines()
                shown = [line for line in lines if "Different:" in line] or lines[-1:]
                print(f"{verdict.seed + 1:>9}  {name}: {shown[-1][:160]}", flush=True)


if __name__ == "__main__":
    main()
