"""Optimizers that step inside backward passes."""

from __future__ import annotations

import gc

import pytest
import torch
from tests.support.trained_model import Group, Local, Remote, assert_same, layers
from torch import optim

from telegrad import autograd, rpc
from telegrad.default_agent import acting_as
from telegrad.errors import BackwardError, WorkersFailed
from telegrad.optim import DistributedOptimizer


def test_parameters_are_updated_and_gradients_freed_when_backward_returns(group: Group) -> None:
    remote, local = Remote(), Local()
    optimizer = DistributedOptimizer(optim.SGD, remote.rrefs, lr=0.1, step_in_backward=True)
    own = torch.ones(4, 4, dtype=torch.double)
    remote.tensors[0].grad = own
    with autograd.context() as context:
        context.backward(remote.loss(0))
        for agent in group.values():
            with acting_as(agent):
                assert autograd.get_gradients(context) == {}
        local.train(optim.SGD(local.tensors, lr=0.1), [0])
        assert_same(remote, local)
        optimizer.step(context)  # does nothing
        assert_same(remote, local)
    assert remote.tensors[0].grad is own
    assert torch.equal(own, torch.ones_like(own))


def test_a_parameter_used_by_several_calls_is_updated_once(group: Group) -> None:
    weight = torch.ones(3, dtype=torch.double, requires_grad=True)
    twin = weight.detach().clone().requires_grad_()
    layers[0] = [weight]
    optimizer = DistributedOptimizer(optim.Adagrad, [rpc.remote("b", first)], lr=0.1, step_in_backward=True)
    here = optim.Adagrad([twin], lr=0.1)
    for _ in range(3):
        with autograd.context() as context:
            context.backward(sum(rpc.rpc_sync("b", times, (number,)) for number in (1.0, 2.0, 4.0)))
            optimizer.step(context)
        here.zero_grad()
        (7 * twin.square()).sum().backward()
        here.step()
    torch.testing.assert_close(weight, twin, rtol=1e-12, atol=0)


def test_step_handles_passes_that_start_at_a_reference(group: Group) -> None:
    weight = torch.ones(3, dtype=torch.double, requires_grad=True)
    layers[0] = [weight]
    optimizer = DistributedOptimizer(optim.SGD, [rpc.remote("b", first)], lr=0.25, step_in_backward=True)
    with autograd.context() as context:
        loss = rpc.remote("b", linear)
        context.backward(rpc.rpc_sync("b", linear))
        loss.backward(context)
        optimizer.step(context)
    assert weight.tolist() == [0.5, 0.5, 0.5]


def first() -> torch.Tensor:
    return layers[0][0]


def times(number: float) -> torch.Tensor:
    return (number * layers[0][0].square()).sum()


def test_passes_of_different_workers_step_with_their_own_optimizers(group: Group) -> None:
    weight = torch.zeros(3, dtype=torch.double, requires_grad=True)
    layers[0] = [weight]
    rates = {"a": 1.0, "c": 100.0}
    optimizers = {}
    for worker, rate in rates.items():
        with acting_as(group[worker]):
            optimizers[worker] = DistributedOptimizer(
                optim.SGD, [rpc.remote("b", first)], lr=rate, maximize=True, step_in_backward=True
            )
    for worker in ("a", "c", "a", "b"):  # b has no optimizer: its pass steps nothing
        with acting_as(group[worker]), autograd.context() as context:
            context.backward(rpc.rpc_sync("b", linear))
    assert torch.equal(weight, torch.full_like(weight, 102.0))


def linear() -> torch.Tensor:
    return layers[0][0].sum()


def backward_here(context: int) -> None:
    autograd.backward(context, [linear()])


def test_a_pass_started_on_another_worker_keeps_its_gradients_for_step(group: Group) -> None:
    weight = torch.zeros(3, dtype=torch.double, requires_grad=True)
    layers[0] = [weight]
    optimizer = DistributedOptimizer(optim.SGD, [rpc.remote("b", first)], lr=1.0, maximize=True, step_in_backward=True)
    with autograd.context() as context:
        rpc.rpc_sync("b", backward_here, (context,))
        assert not weight.any()
        optimizer.step(context)
    assert torch.equal(weight, torch.ones_like(weight))


def test_local_passes_and_passes_into_grad_do_not_step(group: Group) -> None:
    weight = torch.zeros(3, dtype=torch.double, requires_grad=True)
    layers[0] = [weight]
    optimizer = DistributedOptimizer(optim.SGD, [rpc.remote("b", first)], lr=1.0, maximize=True, step_in_backward=True)
    linear().backward()
    with autograd.context() as context:
        context.backward(rpc.rpc_sync("b", linear), accumulate="grad")
    with autograd.context() as context:
        x = torch.ones(3, dtype=torch.double, requires_grad=True)
        context.backward(rpc.rpc_sync("b", product, (x,)), inputs=[x])
    assert not weight.any()
    assert torch.equal(weight.grad, torch.full_like(weight, 2.0))
    optimizer.step()
    assert torch.equal(weight, torch.full_like(weight, 2.0))


def product(x: torch.Tensor) -> torch.Tensor:
    return (x * layers[0][0]).sum()


def test_a_deleted_optimizer_no_longer_steps(group: Group) -> None:
    weight = torch.zeros(3, dtype=torch.double, requires_grad=True)
    layers[0] = [weight]
    optimizer = DistributedOptimizer(optim.SGD, [rpc.remote("b", first)], lr=1.0, maximize=True, step_in_backward=True)
    optimizer.param_groups[0]["lr"] = 2.0
    with autograd.context() as context:
        context.backward(rpc.rpc_sync("b", linear))
    assert torch.equal(weight, torch.full_like(weight, 2.0))
    gc.disable()
    try:
        del optimizer
        with autograd.context() as context:
            context.backward(rpc.rpc_sync("b", linear))
    finally:
        gc.enable()
    assert torch.equal(weight, torch.full_like(weight, 2.0))


def test_a_second_pass_over_changed_parameters_raises(group: Group) -> None:
    remote = Remote()
    optimizer = DistributedOptimizer(optim.SGD, remote.rrefs, lr=0.1, step_in_backward=True)
    with autograd.context() as context:
        loss = remote.loss(0)
        context.backward(loss, retain_graph=True)
        with pytest.raises(BackwardError, match="modified by an inplace operation"):
            context.backward(loss)
    assert optimizer.param_groups  # alive until here


class Failing(optim.SGD):
    def step(self, closure: object = None) -> None:
        raise ValueError("Error running optimizer.")


def test_a_failed_step_fails_the_pass(group: Group) -> None:
    remote = Remote()
    optimizer = DistributedOptimizer(Failing, remote.rrefs[2:3], lr=0.1, step_in_backward=True)
    with autograd.context() as context:
        with pytest.raises(BackwardError, match="Error running optimizer") as caught:
            context.backward(remote.loss(0))
        assert caught.value.worker == "c"
    assert optimizer.param_groups  # alive until here


def test_parameters_without_requires_grad_raise(group: Group) -> None:
    remote = Remote()
    for tensor in remote.tensors:
        tensor.requires_grad_(False)
    with pytest.raises(WorkersFailed, match="needs parameters that require grad, but number 0 of worker 'b'"):
        DistributedOptimizer(optim.SGD, remote.rrefs, lr=0.1, step_in_backward=True)
