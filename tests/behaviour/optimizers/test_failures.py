"""Failures of several workers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.support.trained_model import Group, Remote
from torch import optim

from telegrad import autograd, rpc
from telegrad.errors import WorkersFailed
from telegrad.optim import DistributedOptimizer


class FailingOptimizer(optim.Optimizer):
    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    def step(self, closure: Any = None) -> Any:
        raise ValueError("Error running optimizer.")


class OptimizerFailingOnConstructor(optim.Optimizer):
    def __init__(self, params: Any) -> None:
        raise ValueError("Error creating optimizer.")


class FailingOnOne(optim.SGD):
    def step(self, closure: Any = None) -> Any:
        if rpc.get_worker_info().name == "b":
            raise KeyError("only here")
        super().step()


def test_errors_of_several_workers_are_raised_together(group: Group) -> None:
    remote = Remote()
    optimizer = DistributedOptimizer(FailingOptimizer, remote.rrefs)
    with autograd.context() as context:
        context.backward(remote.loss(0))
        with pytest.raises(WorkersFailed, match=r"step\(\) failed on 3 of 3 workers") as caught:
            optimizer.step(context)
    for worker in "abc":
        assert f"worker '{worker}': ValueError: Error running optimizer." in str(caught.value)
    assert {type(error) for error in caught.value.errors.values()} == {ValueError}


def test_the_error_of_one_worker_keeps_its_type_and_the_others_step(group: Group) -> None:
    remote = Remote()
    before = [tensor.detach().clone() for tensor in remote.tensors]
    optimizer = DistributedOptimizer(FailingOnOne, remote.rrefs, lr=0.1)
    with autograd.context() as context:
        context.backward(remote.loss(0))
        with pytest.raises(KeyError, match="only here") as caught:
            optimizer.step(context)
    assert "(step(), on worker 'b')" in caught.value.__notes__
    changed = [not torch.equal(tensor, old) for tensor, old in zip(remote.tensors, before, strict=True)]
    assert changed == [False, False, True, True, True, True, False, False, False]
    assert all(tensor.grad is None for tensor in remote.tensors)


def test_errors_of_constructors_are_raised_together(group: Group) -> None:
    remote = Remote()
    with pytest.raises(WorkersFailed, match="Error creating optimizer") as caught:
        DistributedOptimizer(OptimizerFailingOnConstructor, remote.rrefs)
    assert sorted(caught.value.errors) == ["a", "b", "c"]
    with pytest.raises(ValueError, match="Invalid learning rate") as one:
        DistributedOptimizer(optim.SGD, remote.rrefs[:1], lr=-1.0)
    assert "worker 'b'" in one.value.__notes__[-1]
