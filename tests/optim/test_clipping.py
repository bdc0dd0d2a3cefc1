"""Gradient clipping by the norm over the parameters of all workers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tests.support.trained_model import Group, Local, Remote, assert_same, layers
from torch import nn, optim

from telegrad import autograd, rpc
from telegrad.default_agent import acting_as
from telegrad.errors import TelegradError
from telegrad.optim import DistributedOptimizer, clip_grad_norm_

STEPS = range(4)


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.5, math.inf])
@pytest.mark.parametrize("way", ["method", "function"])
def test_clipping_is_the_same_as_in_one_process(group: Group, norm_type: float, way: str) -> None:
    remote, local = Remote(), Local()
    distributed = DistributedOptimizer(optim.SGD, remote.rrefs, lr=0.1)
    reference = optim.SGD(local.tensors, lr=0.1)
    norms: list[torch.Tensor] = []
    wanted: list[torch.Tensor] = []

    def clip(context: int) -> None:
        if way == "method":
            norms.append(distributed.clip_grad_norm_(context, 0.5, norm_type))
        else:
            norms.append(clip_grad_norm_(context, remote.rrefs, 0.5, norm_type))

    remote.train(distributed, STEPS, clip)
    local.train(reference, STEPS, lambda: wanted.append(nn.utils.clip_grad_norm_(local.tensors, 0.5, norm_type)))
    torch.testing.assert_close(norms, wanted, rtol=1e-9, atol=1e-9)
    assert all(norm > 0.5 for norm in norms), "nothing was clipped"
    assert_same(remote, local)


def test_gradients_below_the_norm_are_not_changed(group: Group) -> None:
    remote = Remote()
    with autograd.context() as context:
        context.backward(remote.loss(0))
        before = {tensor: grad.clone() for tensor, grad in context.gradients.items()}
        assert clip_grad_norm_(context, remote.rrefs, 1e6) > 0
        assert before
        assert all(torch.equal(context.gradients[tensor], grad) for tensor, grad in before.items())


def test_the_norm_of_no_gradients_is_zero(group: Group) -> None:
    remote = Remote()
    with autograd.context() as context:
        assert clip_grad_norm_(context, remote.rrefs, 1.0) == 0


def test_clipping_without_a_context_clips_grad(group: Group) -> None:
    remote, local = Remote(), Local()
    with autograd.context() as context:
        context.backward(remote.loss(0), accumulate="grad")
    local.loss(0).backward()
    norm = clip_grad_norm_(None, remote.rrefs, 0.5)
    torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(local.tensors, 0.5))
    for distributed, reference in zip(remote.tensors, local.tensors, strict=True):
        torch.testing.assert_close(distributed.grad, reference.grad)


def test_sparse_gradients_are_clipped(group: Group) -> None:
    embedding = nn.Embedding(5, 3, sparse=True, dtype=torch.double)
    layers[0] = [embedding.weight]
    with autograd.context() as context:
        context.backward(rpc.rpc_sync("b", looked_up))
        norm = clip_grad_norm_(context, [rpc.remote("b", table)], 1.0)
        with acting_as(group["b"]):
            clipped = autograd.get_gradients(context)[embedding.weight].to_dense()
    # Row 1 is looked up twice, so its gradient is 2 everywhere; row 2 once.
    assert norm.item() == pytest.approx(math.sqrt(3 * 4 + 3 * 1))
    assert clipped.norm().item() == pytest.approx(1.0, rel=1e-5)


def table() -> Any:
    return layers[0][0]


def looked_up() -> torch.Tensor:
    return nn.functional.embedding(torch.tensor([1, 1, 2]), layers[0][0], sparse=True).sum()


def poison(context: int) -> None:
    next(iter(autograd.get_gradients(context).values())).fill_(math.nan)


def test_error_if_nonfinite_names_the_worker(group: Group) -> None:
    remote = Remote()
    with autograd.context() as context:
        context.backward(remote.loss(0))
        rpc.rpc_sync("c", poison, (context,))
        with pytest.raises(TelegradError, match=r"non-finite.* on worker 'c'\."):
            clip_grad_norm_(context, remote.rrefs, 1.0, error_if_nonfinite=True)
        assert clip_grad_norm_(context, remote.rrefs, 1.0).isnan()
        assert all(grad.isnan().all() for grad in context.gradients.values())  # as in torch


def test_clipping_with_step_in_backward_raises(group: Group) -> None:
    optimizer = DistributedOptimizer(optim.SGD, Remote().rrefs, lr=0.1, step_in_backward=True)
    with autograd.context() as context, pytest.raises(TelegradError, match="create the optimizer without it"):
        optimizer.clip_grad_norm_(context, 1.0)
