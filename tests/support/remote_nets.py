"""Modules for tests of RemoteModule."""

from __future__ import annotations

from typing import Any

import torch

from telegrad.agent.agent import Agent
from telegrad.nn import RemoteModule

Group = dict[str, Agent]


class Net(torch.nn.Module):
    """A module with a submodule, a parameter, a buffer and extra methods."""

    def __init__(self, width: int = 3, *, bias: bool = True) -> None:
        super().__init__()
        self.width = width
        self.inner = torch.nn.Linear(2, width, bias=bias)
        numbers = torch.Generator().manual_seed(0)  # not the global one: all workers are in this process
        for parameter in self.inner.parameters():
            torch.nn.init.uniform_(parameter, -1, 1, generator=numbers)
        self.scale = torch.nn.Parameter(torch.ones(1))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: torch.Tensor, *, shift: float = 0.0) -> tuple[torch.Tensor, dict[str, Any]]:
        self.calls += 1
        return self.inner(x) * self.scale + shift, {"mode": self.training, "twice": x * 2}

    def norm(self, power: int) -> torch.Tensor:
        return self.inner.weight.abs().pow(power).sum()

    def reset(self) -> Net:
        torch.nn.init.zeros_(self.inner.weight)
        return self


class Parent(torch.nn.Module):
    """A local module with a remote one in it."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.first = torch.nn.Linear(2, 2)
        self.net = inner
        self.last = torch.nn.BatchNorm1d(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.net(self.first(x))[0])


def module_on(agent: Agent, module: RemoteModule) -> torch.nn.Module:
    """Return the module itself: all workers of a local group are in this process."""
    return agent.references.value(module.module_rref._id, None)


def fill(module: torch.nn.Module) -> None:
    if isinstance(module, torch.nn.Linear):
        torch.nn.init.constant_(module.weight, 7.0)
