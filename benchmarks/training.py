"""Compares training with remote modules on telegrad and on torch's RPC, running the same programs in turn.

    python benchmarks/training.py [--transport unix|tcp] [--cases server ...] [--blocks N] [--quick] [--json FILE]

Times are per step (of all trainers, or of all micro-batches); steps per second are their inverse.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping
from typing import Any

import command
import torch
from pairs import (
    CALLER,
    TELEGRAD,
    TORCH,
    Action,
    BenchmarkError,
    Case,
    System,
    Workers,
    at_most,
    join_telegrad,
    join_torch,
)
from torch.distributed import autograd as torch_autograd
from torch.distributed import rpc as torch_rpc

from telegrad import autograd as telegrad_autograd
from telegrad import optim as telegrad_optim
from telegrad import rpc as telegrad_rpc

SERVER = "server"
OTHERS = ("other0", "other1", "other2")
"""The trainers, or the stages of a pipeline."""
NAMES = (CALLER, SERVER, *OTHERS)
WIDTH, ROWS, MICRO_BATCHES = 64, 32, 4


def _modules(system: str) -> tuple[Any, Any, Any]:
    """The rpc, autograd and optimizer of a system."""
    if system == TORCH:
        _say_nothing_of_torchscript()
        from torch.distributed.optim import DistributedOptimizer

        return torch_rpc, torch_autograd, DistributedOptimizer
    return telegrad_rpc, telegrad_autograd, telegrad_optim.DistributedOptimizer


def _say_nothing_of_torchscript() -> None:
    """Silence a deprecation that torch's own optimizer triggers and that no warning filter stops."""
    show = warnings.showwarning

    def show_others(message: Warning | str, *rest: Any) -> None:
        if "TorchScript" not in str(message):
            show(message, *rest)

    if getattr(show, "__name__", "") != show_others.__name__:
        warnings.showwarning = show_others


# -- functions that run on the workers ------------------------------------------------------------------------


class Part(torch.nn.Module):
    """A layer on one worker."""

    def __init__(self, system: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self._rref = _modules(system)[0].RRef
        # One layer: its backward needs no weights, so steps of other trainers do not affect it.
        self.layer = torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run the layer."""
        return torch.tanh(self.layer(x))

    def forward_from(self, before: Any) -> torch.Tensor:
        """Run the layer on a remote value."""
        return self(before.to_here())

    def parameter_rrefs(self) -> list[Any]:
        """Return RRefs to all parameters."""
        return [self._rref(parameter) for parameter in self.parameters()]

    def nothing(self) -> None:
        """Do almost nothing."""


class Trainer:
    """Trains a model that lives on the server."""

    def __init__(self, system: str, server: Any) -> None:
        _, self._autograd, optimizer = _modules(system)
        self._server = server
        self._optimizer = optimizer(torch.optim.SGD, server.rpc_sync().parameter_rrefs(), lr=0.01)
        self._x, self._y = torch.rand(ROWS, WIDTH), torch.rand(ROWS, WIDTH)

    def step(self) -> float:
        """Run one step with this trainer's data."""
        with self._autograd.context() as context_id:
            loss = (self._server.rpc_sync().forward(self._x) - self._y).square().mean()
            self._autograd.backward(context_id, [loss])
            self._optimizer.step(context_id)
        return loss.item()


# -- cases ----------------------------------------------------------------------------------------------------


def _system(rpc: Any) -> str:
    return TORCH if rpc is torch_rpc else TELEGRAD


def _parameter_server(rpc: Any) -> Action:
    system = _system(rpc)
    server = rpc.remote(SERVER, Part, (system,))
    mine = Trainer(system, server)
    others = [rpc.remote(name, Trainer, (system, server)) for name in OTHERS]

    def step() -> float:
        under_way = [other.rpc_async().step() for other in others]
        loss = mine.step()
        for future in under_way:
            future.wait()
        return loss

    losses = [step() for _ in range(20)]
    if not losses[-1] < losses[0]:
        raise BenchmarkError("the parameter server does not learn: its time means nothing")
    return step


def _pipeline(rpc: Any) -> Action:
    system = _system(rpc)
    _, autograd, optimizer_class = _modules(system)
    stages = [rpc.remote(name, Part, (system,)) for name in OTHERS]
    parameters = [rref for stage in stages for rref in stage.rpc_sync().parameter_rrefs()]
    optimizer = optimizer_class(torch.optim.SGD, parameters, lr=0.05)
    x, y = torch.rand(ROWS, WIDTH), torch.rand(ROWS, WIDTH)

    def step() -> float:
        with autograd.context() as context_id:
            outputs = []
            for part in x.chunk(MICRO_BATCHES):
                value = rpc.RRef(part)
                for stage in stages:
                    value = stage.remote().forward_from(value)
                outputs.append(value)
            loss = (torch.cat([value.to_here() for value in outputs]) - y).square().mean()
            autograd.backward(context_id, [loss])
            optimizer.step(context_id)
        return loss.item()

    losses = [step() for _ in range(20)]
    if not losses[-1] < losses[0]:
        raise BenchmarkError("the pipeline does not learn: its time means nothing")
    return step


def _remote(rpc: Any) -> Action:
    x = torch.rand(4)
    return lambda: rpc.remote(SERVER, torch.add, (x, 1)).to_here()


def _proxy(rpc: Any) -> Action:
    part = rpc.remote(SERVER, Part, (_system(rpc),))
    part.rpc_sync().nothing()
    return lambda: part.rpc_sync().nothing()


CASES = {
    "server": Case(
        f"a parameter server and {len(OTHERS) + 1} trainers: one step of each",
        100,  # the first 60 after a start are slower
        _parameter_server,
        targets=at_most(0.5),
    ),
    "pipeline": Case(f"{len(OTHERS)} stages, {MICRO_BATCHES} micro-batches: one step", 15, _pipeline),
    "remote": Case("remote() and to_here() of a small tensor", 100, _remote),
    "proxy": Case("a method of a remote object: rref.rpc_sync().method()", 200, _proxy),
}
SYSTEMS = {TORCH: System(join_torch, NAMES), TELEGRAD: System(join_telegrad, NAMES)}


def turns(ready: Mapping[str, Workers], case: str, number: int) -> dict[str, tuple[Workers, str]]:
    """Return both systems, in every case."""
    return {system: (ready[system], case) for system in (TORCH, TELEGRAD)}


BENCHMARK = command.Benchmark(
    "training.py",
    "Compare training with remote parts of telegrad with that of torch.distributed.rpc.",
    CASES,
    SYSTEMS,
    turns,
)


if __name__ == "__main__":
    # Imported under its own name: the other side finds remote functions by module name.
    import training

    sys.exit(command.run(training.BENCHMARK))
