"""The reference for tests of autograd: the same program in one process, without remote calls.

A program gets a function `call(worker, function, *args)`. `remotely` calls the worker, `locally` runs the function.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from telegrad import autograd, rpc
from telegrad.agent.agent import Agent
from telegrad.default_agent import acting_as

Group = dict[str, Agent]
Program = Callable[[Callable[..., Any]], torch.Tensor]
STATE = (
    "num_autograd_contexts",
    "num_current_backward_passes",
    "sends",
    "recvs",
)
PATIENCE = 30.0


def remotely(worker: str, function: Callable[..., Any], *args: Any) -> Any:
    return rpc.rpc_sync(worker, function, args)


def locally(worker: str, function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)


def leaf(*shape: int, dtype: torch.dtype = torch.double, seed: int = 0) -> torch.Tensor:
    numbers = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, dtype=dtype, generator=numbers).requires_grad_()


def gradients_on(agent: Agent, context: int) -> dict[torch.Tensor, torch.Tensor]:
    """Return the gradients of a context on one worker: none if the worker took no part in it."""
    if agent.autograd.contexts.get(context) is None:
        return {}
    with acting_as(agent):
        return autograd.get_gradients(context)


def all_gradients(group: Group, context: int) -> dict[torch.Tensor, torch.Tensor]:
    """Return the gradients of a context on all workers, summed over the workers that share a leaf."""
    found: dict[torch.Tensor, torch.Tensor] = {}
    for agent in group.values():
        for tensor, grad in gradients_on(agent, context).items():
            found[tensor] = found[tensor] + grad if tensor in found else grad
    return found


def wanted_gradients(program: Program, leaves: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
    """Return the gradients that the program has in one process. Restores ``.grad``."""
    before = [tensor.grad for tensor in leaves]
    for tensor in leaves:
        tensor.grad = None
    program(locally).backward()
    wanted = [tensor.grad for tensor in leaves]
    for tensor, grad in zip(leaves, before, strict=True):
        tensor.grad = grad
    return wanted


def assert_equal(got: torch.Tensor | None, want: torch.Tensor | None) -> None:
    if got is None or want is None:
        assert got is want
    else:
        exact = want.dtype in (torch.double, torch.complex128)
        tolerance = {"rtol": 1e-12, "atol": 1e-15} if exact else {}
        torch.testing.assert_close(got, want, **tolerance)


def assert_as_in_one_process(group: Group, program: Program, leaves: Sequence[torch.Tensor]) -> None:
    """Check that the distributed program has the gradients of one process, on any workers."""
    wanted = wanted_gradients(program, leaves)
    assert any(want is not None for want in wanted), "the program has no gradients to compare"
    with autograd.context() as context:
        context.backward(program(remotely))
        got = all_gradients(group, context)
    for tensor, want in zip(leaves, wanted, strict=True):
        assert_equal(got.get(tensor), want)


def wait_until(condition: Callable[[], bool], what: Callable[[], object] = lambda: "") -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, what()
        threading.Event().wait(0.002)


def nothing_left(agents: Group) -> None:
    """Check that nothing of any context is left. Cleanup messages have no reply, so it may take a moment."""

    def left() -> dict[str, dict[str, int]]:
        found = {name: agent.autograd.debug_info() for name, agent in agents.items()}
        return {
            name: {key: info[key] for key in STATE if info[key]}
            for name, info in found.items()
            if any(info[key] for key in STATE)
        }

    wait_until(lambda: not left(), lambda: f"left behind: {left()}")
