"""What a step changes on the workers that own the parameters."""

from __future__ import annotations

import threading

import torch
from tests.support.trained_model import Group, Remote, layers
from torch import optim

from telegrad import autograd, rpc
from telegrad.default_agent import acting_as
from telegrad.optim import DistributedOptimizer

STEPS = range(5)


def test_a_step_changes_neither_grad_nor_the_gradients_of_the_context(group: Group) -> None:
    remote = Remote()
    optimizer = DistributedOptimizer(optim.SGD, remote.rrefs, lr=0.05)
    own = [torch.full_like(tensor, 7.0) for tensor in remote.tensors]
    for tensor, grad in zip(remote.tensors, own, strict=True):
        tensor.grad = grad
    with autograd.context() as context:
        context.backward(remote.loss(0))
        before = {tensor: grad.clone() for tensor, grad in context.gradients.items()}
        optimizer.step(context)
        assert context.gradients.keys() == before.keys() != set()
        assert all(torch.equal(context.gradients[tensor], grad) for tensor, grad in before.items())
    for tensor, grad in zip(remote.tensors, own, strict=True):
        assert tensor.grad is grad
        assert torch.equal(grad, torch.full_like(tensor, 7.0))


def test_a_parameter_without_a_gradient_is_not_changed(group: Group) -> None:
    remote = Remote()
    before = remote.tensors[-1].detach().clone()
    optimizer = DistributedOptimizer(optim.SGD, remote.rrefs, lr=0.05, weight_decay=0.5)
    remote.tensors[-1].grad = torch.ones(4, dtype=torch.double)  # not of this context
    remote.train(optimizer, STEPS)
    assert torch.equal(remote.tensors[-1], before)


def test_a_worker_outside_the_context_is_not_changed(group: Group) -> None:
    remote = Remote()
    before = [tensor.detach().clone() for tensor in remote.tensors]
    optimizer = DistributedOptimizer(optim.SGD, remote.rrefs, lr=0.05, weight_decay=0.5)
    with autograd.context() as context:
        x = torch.ones(4, dtype=torch.double)
        context.backward((layers[2][0] @ x).sum())  # of worker a alone
        optimizer.step(context)
    changed = [not torch.equal(tensor, old) for tensor, old in zip(remote.tensors, before, strict=True)]
    assert [number for number, flag in enumerate(changed) if flag] == [4]


def test_parameters_without_requires_grad_are_not_changed(group: Group) -> None:
    remote = Remote()
    layers[0][0].requires_grad_(False)
    before = layers[0][0].clone()
    optimizer = DistributedOptimizer(optim.SGD, remote.rrefs, lr=0.05)
    remote.train(optimizer, STEPS)
    assert torch.equal(layers[0][0], before)


def test_steps_of_different_trainers_on_the_same_parameters_do_not_overlap(group: Group) -> None:
    """Each step adds its gradient, so the sum is wrong if two steps mix their gradients."""
    weight = torch.zeros(1000, dtype=torch.double, requires_grad=True)
    layers[0] = [weight]
    steps = 20
    failures: list[BaseException] = []

    def train(worker: str) -> None:
        factor = "abc".index(worker) + 1
        try:
            with acting_as(group[worker]):
                optimizer = DistributedOptimizer(optim.SGD, [rpc.remote("b", first_weight)], lr=1.0, maximize=True)
                for _ in range(steps):
                    with autograd.context() as context:
                        context.backward(rpc.rpc_sync("b", times_weight, (factor,)))
                        optimizer.step(context)
        except BaseException as error:
            failures.append(error)
            raise

    threads = [threading.Thread(target=train, args=(worker,)) for worker in "abc"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert torch.equal(weight, torch.full_like(weight, steps * 6.0))
    assert weight.grad is None


def first_weight() -> torch.Tensor:
    return layers[0][0]


def times_weight(factor: int) -> torch.Tensor:
    return (layers[0][0] * factor).sum()


def test_exact_state_keeps_the_types_that_torch_casts(group: Group) -> None:
    remote = Remote()
    optimizer = DistributedOptimizer(optim.NAdam, remote.rrefs, lr=0.05)
    remote.train(optimizer, STEPS)
    parts = [part.rpc_sync() for part in optimizer.parts()]
    assert len(parts) == len({part.owner_name() for part in optimizer.parts()})
    for part in parts:
        before = flat(part.state(None))
        part.load(part.state(None), 0, exact=True)
        assert all(equal(*pair) for pair in zip(flat(part.state(None)), before, strict=True))
        part.load(part.state(None), 0)
        assert not all(equal(*pair) for pair in zip(flat(part.state(None)), before, strict=True))


def flat(state: object) -> list[object]:
    if isinstance(state, dict):
        return [each for value in state.values() for each in flat(value)]
    return [each for value in state for each in flat(value)] if isinstance(state, list | tuple) else [state]


def equal(one: object, other: object) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    return one == other
