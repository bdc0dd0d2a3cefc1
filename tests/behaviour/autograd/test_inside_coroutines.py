"""A blocking backward() in a coroutine works, unless the pass needs the event loop that it blocks."""

from __future__ import annotations

import asyncio

import pytest
import torch
from tests.support.one_process import Group, leaf

from telegrad import autograd, rpc
from telegrad.errors import TelegradError

LATE = 60.0


async def double(grad: torch.Tensor) -> torch.Tensor:
    return grad * 2


def double_on_b(grad: torch.Tensor) -> torch.Tensor:
    doubled: torch.Tensor = rpc.rpc_sync("b", double, (grad,))
    return doubled


def square(x: torch.Tensor, ask: bool) -> torch.Tensor:
    y = x * x
    if ask:
        y.register_hook(double_on_b)
    return y


async def train(ask: bool, in_thread: bool) -> torch.Tensor:
    x = leaf(3)
    with autograd.context() as context:
        y = rpc.rpc_sync("a", square, (x, ask))
        if in_thread:
            await asyncio.to_thread(autograd.backward, context, [y.sum()], timeout=LATE)
        else:
            autograd.backward(context, [y.sum()], timeout=LATE)
        return autograd.get_gradients(context)[x]


def test_a_pass_that_needs_the_event_loop_that_it_blocks_fails_and_says_so(group: Group) -> None:
    with pytest.raises(TelegradError, match=r"'b' cannot run .*double: a coroutine there blocks .* asyncio.to_thread"):
        rpc.rpc_sync("b", train, (True, False), timeout=LATE)
    x = leaf(3)
    assert torch.equal(rpc.rpc_sync("b", train, (False, False), timeout=LATE), 2 * x.detach())
    assert torch.equal(rpc.rpc_sync("b", train, (True, True), timeout=LATE), 4 * x.detach())
