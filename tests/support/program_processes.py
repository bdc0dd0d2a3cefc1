"""Runs random programs on real processes.

`check_programs` runs on worker 0 of a group that `telegrad.launch` started, and returns the differences to the oracle.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from telegrad import autograd as dist_autograd
from telegrad.backward.contexts import current
from telegrad.rpc.api import get_worker_info, get_worker_infos, rpc_sync
from telegrad.testing.programs import (
    Found,
    Log,
    Outcome,
    Pass,
    Program,
    Progress,
    Worker,
    differences,
    draw_program,
    install_post_hooks,
    make_leaves,
    refusal,
    run_locally,
)
from telegrad.testing.programs.hooks import Key
from telegrad.testing.programs.running import Tensors, left_in_context

_running: dict[int, _Member] = {}
"""This process's member of each running program, by seed."""


class _Member:
    """One worker of one program, and its way to call the others."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.log = Log()
        number = get_worker_info().id
        made = make_leaves(program.leaves)
        self.worker = Worker(number, program, made[number], self.log, self)
        self.worker.handles += install_post_hooks(
            program.leaves, made, lambda: self.log, self, program.counts_only, number
        )

    def call(self, here: int, target: int, service: str, *args: Any) -> Any:
        return rpc_sync(target, serve, (self.program.seed, service, *args))

    def message(self, tensors: Tensors) -> list[torch.Tensor]:
        return list(tensors)

    def sent_together(self, tensors: Tensors) -> None:
        """Do nothing: only the oracle needs it."""

    def hooked(self, key: int, tensors: Tensors, mode: str = "") -> None:
        """Do nothing: only the oracle needs it."""

    def in_thread(self, here: int, action: Callable[[], Any]) -> Any:
        box: list[Any] = []
        thread = threading.Thread(target=lambda: box.append(action()))
        thread.start()
        thread.join()
        return box[0]

    def backward(self, here: int, roots: Tensors, grads: Tensors, retain: bool, inputs: Tensors | None) -> Found:
        dist_autograd.backward(
            _context(), roots, retain, grad_tensors=grads, inputs=inputs, accumulate=self.program.accumulate
        )
        return [self._gradient(tensor) for tensor in inputs or ()]

    def grad(self, here: int, roots: Tensors, grads: Tensors, retain: bool, inputs: Tensors, unused: bool) -> Found:
        found = dist_autograd.grad(_context(), roots, inputs, grads, retain_graph=retain, allow_unused=unused)
        return list(found)

    def gradients(self) -> Found:
        """Return the gradients of the leaves here."""
        return [self._gradient(leaf) for leaf in self.worker.leaves]

    def _gradient(self, tensor: torch.Tensor) -> torch.Tensor | None:
        if self.program.accumulate == "grad":
            return tensor.grad if tensor.is_leaf or tensor.retains_grad else None
        return left_in_context(self.program, tensor, dist_autograd.get_gradients(_context()).get(tensor))


def _context() -> int:
    context = current.get()
    assert context is not None
    return context.id


def prepare(seed: int, workers: int) -> None:
    """Create this process's member of the program of a seed."""
    _running[seed] = _Member(draw_program(seed, most_workers=workers))


def serve(seed: int, service: str, *args: Any) -> Any:
    """Run a service of this worker."""
    return getattr(_running[seed].worker, f"serve_{service}")(*args)


def begin_pass(seed: int, number: int) -> None:
    """Tell the log which pass is running."""
    _running[seed].log.number = number


def look(seed: int) -> Found:
    """Return the gradients that the program has accumulated here so far."""
    return _running[seed].gradients()


def finish(seed: int) -> dict[Key, list[torch.Tensor]]:
    """End the program here, and return its hook calls."""
    member = _running.pop(seed)
    member.worker.end()
    return dict(member.log.calls)


def check_program(seed: int) -> list[str]:
    """Run the program of a seed on this group, and return how it differs from one process."""
    most = len(get_worker_infos())
    program = draw_program(seed, most_workers=most)
    workers = range(program.workers)
    for worker in workers:
        rpc_sync(worker, prepare, (seed, most))
    member, progress = _running[seed], Progress(program)

    def forward() -> None:
        member.worker.environment = member.worker.run(0, [])

    def one_pass(number: int, one: Pass) -> Found | None:
        for worker in workers:
            rpc_sync(worker, begin_pass, (seed, number))
        found: Found | None = (
            rpc_sync(one.worker, serve, (seed, "pass", one)) if one.worker else serve(seed, "pass", one)
        )
        return found

    with dist_autograd.context():
        progress.run(forward, one_pass, lambda: [rpc_sync(worker, look, (seed,)) for worker in workers])
    log = Log()
    for worker in workers:
        for key, values in rpc_sync(worker, finish, (seed,)).items():
            log.calls[key] += values
    got: Outcome = progress.outcome(log)
    want = run_locally(program)
    found = differences(got, want, program, until_error=bool(refusal(got, want)))
    return [f"seed {seed}: {difference}" for difference in found]


def check_programs(first: int, count: int) -> list[str]:
    """On worker 0, run `count` programs. The other workers only serve calls."""
    if get_worker_info().id != 0:
        return []
    return [found for seed in range(first, first + count) for found in check_program(seed)]
