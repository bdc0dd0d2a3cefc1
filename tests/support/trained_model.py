"""A model with layers on several workers, and the same model in one process to compare it with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from telegrad import autograd, rpc
from telegrad.agent.agent import Agent
from telegrad.optim import DistributedOptimizer

Group = dict[str, Agent]
WORKERS = ("b", "c", "a", "b")
"""The workers of the layers; a is the worker that trains."""

layers: dict[int, list[torch.Tensor]] = {}
"""The parameters of each layer. All workers are in this process."""


def fresh_parameters() -> list[torch.Tensor]:
    """Return a weight and a bias for each layer, and a bias that is never used."""
    numbers = torch.Generator().manual_seed(1)
    made = []
    for _ in WORKERS:
        made.append(torch.randn(4, 4, dtype=torch.double, generator=numbers).requires_grad_())
        made.append(torch.randn(4, dtype=torch.double, generator=numbers).requires_grad_())
    made.append(torch.zeros(4, dtype=torch.double, requires_grad=True))
    return made


def data(step: int) -> torch.Tensor:
    return torch.randn(5, 4, dtype=torch.double, generator=torch.Generator().manual_seed(100 + step))


def layer(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x @ weight + bias)


def apply_layer(number: int, x: torch.Tensor) -> torch.Tensor:
    weight, bias = layers[number][:2]
    return layer(x, weight, bias)


def parameter_of(number: int, which: int) -> torch.Tensor:
    return layers[number][which]


class Remote:
    """The model on several workers."""

    def __init__(self, parameters: Sequence[torch.Tensor] | None = None) -> None:
        given = fresh_parameters() if parameters is None else [p.detach().clone().requires_grad_() for p in parameters]
        layers.clear()
        for number in range(len(WORKERS)):
            layers[number] = given[2 * number : 2 * number + 2]
        layers[len(WORKERS) - 1].append(given[-1])
        self.tensors = given
        self.rrefs = [
            rpc.remote(worker, parameter_of, (number, which))
            for number, worker in enumerate(WORKERS)
            for which in range(len(layers[number]))
        ]

    def loss(self, step: int) -> torch.Tensor:
        x = data(step)
        for number, worker in enumerate(WORKERS):
            x = rpc.rpc_sync(worker, apply_layer, (number, x))
        return x.square().sum()

    def train(
        self, optimizer: DistributedOptimizer, steps: Sequence[int], before_step: Callable[[int], Any] | None = None
    ) -> list[float]:
        losses = []
        for step in steps:
            with autograd.context() as context:
                loss = self.loss(step)
                context.backward(loss)
                if before_step is not None:
                    before_step(context)
                optimizer.step(context)
            losses.append(loss.item())
        return losses


class Local:
    """The model in one process."""

    def __init__(self, parameters: Sequence[torch.Tensor] | None = None) -> None:
        given = fresh_parameters() if parameters is None else parameters
        self.tensors = [tensor.detach().clone().requires_grad_() for tensor in given]

    def loss(self, step: int) -> torch.Tensor:
        x = data(step)
        for number in range(len(WORKERS)):
            x = layer(x, self.tensors[2 * number], self.tensors[2 * number + 1])
        return x.square().sum()

    def train(
        self,
        optimizer: torch.optim.Optimizer,
        steps: Sequence[int],
        before_step: Callable[[], Any] | None = None,
    ) -> list[float]:
        losses = []
        for step in steps:
            optimizer.zero_grad()
            loss = self.loss(step)
            loss.backward()
            if before_step is not None:
                before_step()
            optimizer.step()
            losses.append(loss.item())
        return losses


def assert_same(remote: Remote, local: Local, tolerance: float = 1e-9) -> None:
    for wanted, got in zip(local.tensors, remote.tensors, strict=True):
        torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance)
    assert not torch.equal(local.tensors[0], fresh_parameters()[0]), "the parameters never changed"
