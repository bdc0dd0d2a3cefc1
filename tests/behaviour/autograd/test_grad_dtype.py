"""Gradients of a leaf with another `Tensor.grad_dtype` are summed and kept in that dtype, as in one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.support.one_process import Group, gradients_on, locally, remotely

from telegrad import autograd

weights: dict[str, torch.Tensor] = {}
SMALL = 1 / 512
"""1 + SMALL is 1 in bfloat16."""


def made(dtype: torch.dtype | None) -> torch.Tensor:
    x = torch.ones(3, dtype=torch.bfloat16, requires_grad=True)
    x.grad_dtype = dtype
    return x


def scaled(x: torch.Tensor, factor: float) -> torch.Tensor:
    return x * torch.tensor(factor, dtype=torch.bfloat16)


def own_scaled(factor: float) -> torch.Tensor:
    return scaled(weights["w"], factor)


Loss = Callable[[Any, torch.Tensor, float], torch.Tensor]
LOSSES: dict[str, Loss] = {
    "sent as it is": lambda call, x, factor: call("b", scaled, x, factor).float().sum(),
    "sent in two calls": lambda call, x, factor: (
        call("b", scaled, x, factor).float() + call("c", scaled, x, factor).float()
    ).sum(),
    "used here": lambda call, x, factor: call("b", torch.neg, scaled(x, factor)).float().sum(),
    "used here and sent": lambda call, x, factor: (call("b", scaled, x, 1.0).float() + scaled(x, factor).float()).sum(),
    "on the callee": lambda call, x, factor: call("b", own_scaled, factor).float().sum(),
    "twice on the callee": lambda call, x, factor: (
        call("b", own_scaled, 1.0).float() + call("b", own_scaled, factor).float()
    ).sum(),
    "the root": lambda call, x, factor: call("b", torch.neg, x).float().sum() * factor,
}


@pytest.mark.parametrize("hook", [False, True])
@pytest.mark.parametrize("accumulate", ["context", "grad"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, None])
@pytest.mark.parametrize("name", LOSSES)
def test_the_sum_of_two_passes_is_that_of_one_process(
    group: Group, name: str, dtype: torch.dtype | None, accumulate: str, hook: bool
) -> None:
    loss = LOSSES[name]

    def fresh() -> torch.Tensor:
        x = weights["w"] = made(dtype)
        if hook:
            x.register_post_accumulate_grad_hook(lambda tensor: None)
        return x

    x = fresh()
    for factor in (1.0, SMALL):
        loss(locally, x, factor).backward()
    want = x.grad
    assert want is not None
    x = fresh()
    with autograd.context() as context:
        for factor in (1.0, SMALL):
            context.backward(loss(remotely, x, factor), accumulate=accumulate)
        worker = "b" if "callee" in name else "a"
        got = gradients_on(group[worker], context)[x] if accumulate == "context" else x.grad
    assert got is not None
    assert got.dtype == want.dtype
    assert torch.equal(got, want)


@pytest.mark.parametrize("accumulate", ["context", "grad"])
def test_gradients_of_inputs_have_the_grad_dtype(group: Group, accumulate: str) -> None:
    x = made(torch.float32)
    with autograd.context() as context:
        for factor in (1.0, SMALL):
            loss = remotely("b", scaled, x, factor).float().sum()
            (got,) = autograd.grad(context, loss, [x], retain_graph=True)
            assert got.dtype == torch.float32
            context.backward(loss, inputs=[x], accumulate=accumulate)
        total = context.gradients[x] if accumulate == "context" else x.grad
    assert total is not None
    assert total.dtype == torch.float32
    assert total.tolist() == [1 + SMALL] * 3


def test_a_sparse_gradient_has_the_grad_dtype(group: Group) -> None:
    x, twin = (torch.ones(3, 1, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
    x.grad_dtype = twin.grad_dtype = torch.float32
    for factor in (1.0, SMALL):
        sparse_rows(twin, factor).float().sum().backward()
    assert twin.grad is not None
    with autograd.context() as context:
        for factor in (1.0, SMALL):
            context.backward(remotely("b", sparse_rows, x, factor).float().sum())
        got = context.gradients[x]
    assert got.is_sparse == twin.grad.is_sparse
    assert got.dtype == twin.grad.dtype == torch.float32
    assert torch.equal(got.to_dense(), twin.grad.to_dense())


def sparse_rows(x: torch.Tensor, factor: float) -> torch.Tensor:
    return torch.nn.functional.embedding(torch.tensor([0, 1]), x, sparse=True) * factor
