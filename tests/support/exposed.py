"""What the workers of tests in registered mode expose, and what they do not."""

from __future__ import annotations

import os
from typing import Any

import torch
from tests.support.hostile import fire

import telegrad
import telegrad.nn
import telegrad.optim

SECRET = "s3cret"
system = os.system


@telegrad.expose(name="echo")
def echo(*args: Any, **kwargs: Any) -> Any:
    """Return the arguments."""
    return (args, kwargs) if kwargs or len(args) != 1 else args[0]


@telegrad.expose(name="scale")
def scale(x: torch.Tensor, factor: float = 2.0) -> torch.Tensor:
    """Return a multiple of a tensor."""
    return x * factor


@telegrad.expose(name="for friends", allow=["friend*"])
def for_friends() -> str:
    """Return a word that only some may hear."""
    return "hello"


@telegrad.expose(name="fail")
def fail(kind: str) -> None:
    """Raise an exception."""
    if kind == "own class":
        raise Complaint("not plain")
    raise ValueError("plain")


class Complaint(Exception):
    """An exception that only this program knows."""


def not_exposed(*args: Any, **kwargs: Any) -> str:
    """Run although nobody may call it."""
    return fire("a function that is not exposed")


class NotExposed:
    """Created although nobody may."""

    def __init__(self) -> None:
        fire("a class that is not exposed")


@telegrad.expose(name="Vault", methods=["open", "store", "fail"])
class Vault:
    """Keeps a value."""

    def __init__(self, value: Any = None) -> None:
        self.value = value
        self.secret = SECRET
        self.inner = self

    def open(self) -> Any:
        """Return the value."""
        return self.value

    def store(self, value: Any) -> None:
        """Replace the value."""
        self.value = value

    def fail(self) -> None:
        """Raise an exception."""
        raise KeyError("no key")

    def destroy(self) -> None:
        """Run although it is not listed."""
        fire("a method that is not listed")


class ArmoredVault(Vault):
    """A subclass, which is not exposed."""


@telegrad.expose(name="Net", methods=["forward", "parameters", "state_dict", "load_state_dict", "train"])
class Net(torch.nn.Module):
    """A module whose parameters others may use."""

    def __init__(self, inputs: int = 2) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(inputs, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the layer."""
        return torch.tanh(self.layer(x))


@telegrad.expose(name="Closed", methods=["forward"])
class ClosedNet(Net):
    """A module whose parameters others may not use."""
