"""A DistributedOptimizer does the same as a torch optimizer in one process."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from tests.support.trained_model import Group, Local, Remote, assert_same
from torch import optim

from telegrad import autograd
from telegrad.default_agent import acting_as
from telegrad.errors import TelegradError
from telegrad.optim import DistributedOptimizer

STEPS = range(5)
OPTIMIZERS: dict[str, tuple[type[optim.Optimizer], dict[str, Any]]] = {
    "SGD": (optim.SGD, {"lr": 0.05}),
    "momentum": (optim.SGD, {"lr": 0.01, "momentum": 0.9, "weight_decay": 0.1, "nesterov": True}),
    "Adam": (optim.Adam, {"lr": 0.01, "amsgrad": True}),
    "AdamW": (optim.AdamW, {"lr": 0.05}),
    "Adagrad": (optim.Adagrad, {"lr": 0.05}),
    "RMSprop": (optim.RMSprop, {"lr": 0.01, "momentum": 0.5}),
    "Adadelta": (optim.Adadelta, {"rho": 0.95}),
    "Rprop": (optim.Rprop, {"lr": 0.05}),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_torch_optimizer_steps_as_in_one_process(group: Group, name: str, in_backward: bool) -> None:
    optimizer_class, arguments = OPTIMIZERS[name]
    remote, local = Remote(), Local()
    distributed = DistributedOptimizer(optimizer_class, remote.rrefs, step_in_backward=in_backward, **arguments)
    losses = remote.train(distributed, STEPS)
    wanted = local.train(optimizer_class(local.tensors, **arguments), STEPS)
    assert losses == pytest.approx(wanted, rel=1e-9)
    assert_same(remote, local)


def test_a_step_without_a_context_uses_grad(group: Group) -> None:
    remote, local = Remote(), Local()
    distributed = DistributedOptimizer(optim.SGD, remote.rrefs, lr=0.05)
    reference = optim.SGD(local.tensors, lr=0.05)
    for pair in ((0, 1), (2, 3)):
        distributed.zero_grad()
        reference.zero_grad()
        for step in pair:
            with autograd.context() as context:
                context.backward(remote.loss(step), accumulate="grad")
            local.loss(step).backward()
        distributed.step()
        reference.step()
    assert_same(remote, local)
    distributed.zero_grad()
    assert all(tensor.grad is None for tensor in remote.tensors)
    with pytest.raises(TelegradError, match=r"found no \.grad on any worker"):
        distributed.step()


def test_zero_grad_allows_a_second_step_in_a_context(group: Group) -> None:
    remote, local = Remote(), Local()
    distributed = DistributedOptimizer(optim.SGD, remote.rrefs, lr=0.05)
    with autograd.context() as context:
        for step in (0, 1):
            distributed.zero_grad(context_id=context)
            context.backward(remote.loss(step))
            distributed.step(context)
        distributed.zero_grad(set_to_none=False, context_id=context)
        with acting_as(group["b"]):
            grads = autograd.get_gradients(context)
        assert grads
        assert all(not grad.any() for grad in grads.values())
    local.train(optim.SGD(local.tensors, lr=0.05), (0, 1))
    assert_same(remote, local)


def test_concurrent_contexts_do_not_mix(group: Group) -> None:
    remote, local = Remote(), Local()
    optimizer = DistributedOptimizer(optim.SGD, remote.rrefs, lr=0.05)
    ready, may_step = threading.Event(), threading.Event()

    def other() -> None:
        with acting_as(group["a"]), autograd.context() as context:
            context.backward(remote.loss(1))
            ready.set()
            may_step.wait(20)
            optimizer.step(context)

    thread = threading.Thread(target=other)
    thread.start()
    assert ready.wait(20)
    with autograd.context() as context:
        context.backward(remote.loss(0))
        optimizer.step(context)
    may_step.set()
    thread.join()
    reference = optim.SGD(local.tensors, lr=0.05)
    losses = [local.loss(0), local.loss(1)]
    grads = [torch.autograd.grad(loss, local.tensors[:-1]) for loss in losses]
    for step_grads in grads:
        for tensor, grad in zip(local.tensors, step_grads, strict=False):
            tensor.grad = grad
        reference.step()
    assert_same(remote, local)


def test_a_finished_context_raises(group: Group) -> None:
    remote = Remote()
    optimizer = DistributedOptimizer(optim.SGD, remote.rrefs, lr=0.1)
    with autograd.context() as context:
        pass
    for act in (
        optimizer.step,
        lambda c: optimizer.clip_grad_norm_(c, 1.0),
        lambda c: optimizer.zero_grad(context_id=c),
    ):
        with pytest.raises(TelegradError, match="Could not find autograd context"):
            act(context)


def test_add_param_group_raises(group: Group) -> None:
    remote = Remote()
    optimizer = DistributedOptimizer(optim.SGD, remote.rrefs[:2], lr=0.1)
    with pytest.raises(TelegradError, match="create another one"):
        optimizer.add_param_group({"params": remote.rrefs[2:]})
    assert "lr: 0.1" in repr(optimizer)


def test_a_step_in_a_context_without_a_pass_warns(group: Group) -> None:
    remote = Remote()
    distributed = DistributedOptimizer(optim.SGD, remote.rrefs, lr=0.05)
    with autograd.context() as context, pytest.warns(UserWarning, match=r"changed no parameter.*context\.backward"):
        distributed.step(context)
