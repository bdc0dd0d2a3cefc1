"""A group whose references must all be freed, and functions and classes for its workers to run."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from telegrad import rpc
from telegrad.agent.agent import Agent
from telegrad.default_agent import acting_as
from telegrad.rref.handle import RRef
from telegrad.testing.group import local_group

Group = dict[str, Agent]
PATIENCE = 20.0

gates: dict[str, threading.Event] = {}


@contextmanager
def group_that_frees_everything() -> Iterator[Group]:
    """Run workers a, b and c on real sockets, act as a, and check that no references are left at the end."""
    with local_group(["a", "b", "c"]) as agents:
        with acting_as(agents["a"]):
            yield agents
        assert becomes_true(lambda: nothing_is_held(agents)), [agent.references.held() for agent in agents.values()]


def nothing_is_held(group: Group) -> bool:
    return not any(any(agent.references.counts().values()) for agent in group.values() if not agent.closed)


def becomes_true(condition: Callable[[], bool], patience: float = PATIENCE) -> bool:
    """Wait for a condition. References are released by a thread, so this takes a moment."""
    deadline = time.monotonic() + patience
    while not condition():
        if time.monotonic() > deadline:
            return False
        gc.collect()
        threading.Event().wait(0.005)
    return True


# -- run by workers ----------------------------------------------------------------------------------------------------


class Counter:
    def __init__(self, start: int = 0) -> None:
        self.count = start

    def add(self, step: int = 1) -> int:
        self.count += step
        return self.count

    async def add_later(self, step: int) -> int:
        await asyncio.sleep(0)
        return self.add(step)

    @rpc.functions.async_execution
    def add_elsewhere(self, to: str, step: int) -> torch.futures.Future[int]:
        return rpc.rpc_async(to, add, (self.count, step))

    def fail(self) -> None:
        raise Odd(1, 2)


class Summing:
    def total(self, x: torch.Tensor) -> float:
        return float(x.sum())


class Odd(Exception):
    """An exception that cannot be rebuilt from its args."""

    def __init__(self, left: int, right: int) -> None:
        super().__init__(f"{left} and {right}")
        self.left = left


def add(x: Any, y: Any) -> Any:
    return x + y


def raise_odd(*args: object) -> None:
    raise Odd(1, 2)


def raise_lookup(text: str) -> None:
    raise LookupError(text)


def leave() -> None:
    raise SystemExit(3)


def fetch(rref: RRef[Any]) -> Any:
    return rref.to_here()


def is_owner(rref: RRef[Any]) -> bool:
    return rref.is_owner()


def confirmed(rrefs: list[RRef[Any]]) -> list[bool]:
    return [rref.confirmed_by_owner() for rref in rrefs]


def give_back(value: Any) -> Any:
    return value


def own_reference(value: Any) -> RRef[Any]:
    return RRef(value)


def wait_for(gate: str) -> str:
    assert gates[gate].wait(PATIENCE)
    return gate


def length(data: bytes, gate: str = "") -> int:
    if gate:
        wait_for(gate)
    return len(data)


def weight() -> torch.Tensor:
    return torch.full((2,), 3.0, requires_grad=True)


def times(x: torch.Tensor, rref: RRef[torch.Tensor]) -> torch.Tensor:
    return x * rref.to_here()


def loss_of(x: torch.Tensor, w: RRef[torch.Tensor]) -> torch.Tensor:
    return (x * w.local_value()).sum()


def sum_times(x: torch.Tensor, w: RRef[torch.Tensor]) -> torch.Tensor:
    return (x.sum() * w.local_value()).sum()


def grad_of(w: RRef[torch.Tensor]) -> torch.Tensor | None:
    return w.local_value().grad


@dataclass
class Holder:
    rref: RRef[Any]
    x: torch.Tensor


class Name(str):
    """A subclass of str, like numpy's."""

    def __str__(self) -> str:
        return "another"
