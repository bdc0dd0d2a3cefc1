"""Runs random programs on real processes: the functions that workers call on each other.

`check_programs` runs on worker 0 of a group that `telegrad.launch` started, and returns what differed from the oracle.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from telegrad.rpc import dist_autograd
from telegrad.rpc.api import get_worker_info, get_worker_infos, rpc_sync
from telegrad.testing.passes import run_passes
from telegrad.testing.programs import (
    LEAVES,
    Body,
    Log,
    Outcome,
    Worker,
    differences,
    draw_program,
    make_leaves,
    run_locally,
)

_playing: dict[int, Worker] = {}
"""This process's part in each program that is under way."""


def prepare(seed: int, workers: int) -> None:
    """Take part in the program of a seed."""
    _playing[seed] = Worker(make_leaves(seed, workers)[get_worker_info().id], Log())


def run_body(seed: int, body: Body, *arguments: torch.Tensor) -> list[torch.Tensor]:
    """Run a body here."""
    environment = _run(seed, body, arguments)
    return [environment[place] for place in body.results]


def _run(seed: int, body: Body, arguments: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    def call(there: int, sent: Sequence[torch.Tensor], inner: Body) -> list[torch.Tensor]:
        result: list[torch.Tensor] = rpc_sync(there, run_body, (seed, inner, *sent))
        return result

    return _playing[seed].run(body, arguments, call, _in_thread)


def _in_thread(action: Callable[[], Any]) -> Any:
    box: list[Any] = []
    thread = threading.Thread(target=lambda: box.append(action()))
    thread.start()
    thread.join()
    return box[0]


def finish(seed: int, context: int) -> tuple[list[torch.Tensor | None], dict[int, list[torch.Tensor]]]:
    """What the program left here: gradients, and calls of hooks."""
    worker = _playing.pop(seed)
    worker.end()
    there = dist_autograd._autograd().contexts.get(context)
    grads = [None] * LEAVES if there is None else [there.gradients.get(leaf) for leaf in worker.leaves]
    return [None if grad is None else grad.detach() for grad in grads], dict(worker.log.calls)


def check_program(seed: int) -> list[str]:
    """Run the program of a seed on this group, from here, and say how it differs from one process."""
    program = draw_program(seed, most_workers=len(get_worker_infos()))
    for worker in range(program.workers):
        rpc_sync(worker, prepare, (seed, program.workers))
    with dist_autograd.context() as context:
        environment = _run(seed, program.body, ())
        autograd = dist_autograd._autograd()
        wanted, failed = run_passes(program, environment, autograd, autograd.contexts.retrieve(int(context)))
        grads: list[list[torch.Tensor | None]] = []
        hooks: dict[int, list[torch.Tensor]] = {}
        for worker in range(program.workers):
            left, calls = rpc_sync(worker, finish, (seed, int(context)))
            grads.append(left)
            hooks.update(calls)
    outcome = Outcome(grads, hooks, 0, [None if grad is None else grad.detach() for grad in wanted], failed)
    found = differences(outcome, run_locally(program), hooks=program.hooks_are_equal)
    return [f"seed {seed}: {line}" for line in found]


def check_programs(first: int, count: int) -> list[str]:
    """On worker 0: run so many programs. On the others: nothing; they are called."""
    if get_worker_info().id != 0:
        return []
    return [found for seed in range(first, first + count) for found in check_program(seed)]
