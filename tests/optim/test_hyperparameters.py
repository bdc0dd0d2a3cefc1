"""Hyperparameters and schedulers act on the optimizers of all workers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.support.trained_model import Group, Local, Remote, assert_same
from torch import optim
from torch.optim import lr_scheduler

from telegrad.optim import DistributedOptimizer

STEPS = range(5)
SCHEDULERS: dict[str, Callable[[optim.Optimizer], Any]] = {
    "StepLR": lambda optimizer: lr_scheduler.StepLR(optimizer, 2, gamma=0.5),
    "CosineAnnealingLR": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 5),
    "OneCycleLR": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=8),
    "chained": lambda optimizer: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ExponentialLR(optimizer, 0.9), lr_scheduler.LinearLR(optimizer, 0.5, total_iters=3)]
    ),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_change_the_rate_on_all_workers(group: Group, name: str, in_backward: bool) -> None:
    make = SCHEDULERS[name]
    remote, local = Remote(), Local()
    distributed = DistributedOptimizer(optim.SGD, remote.rrefs, lr=0.1, momentum=0.9, step_in_backward=in_backward)
    reference = optim.SGD(local.tensors, lr=0.1, momentum=0.9)
    schedule, reference_schedule = make(distributed), make(reference)
    for step in STEPS:
        remote.train(distributed, [step])
        schedule.step()
        local.train(reference, [step])
        reference_schedule.step()
    assert schedule.get_last_lr() == reference_schedule.get_last_lr()
    assert_same(remote, local)


def test_reduce_on_plateau_changes_the_rate_on_all_workers(group: Group, in_backward: bool) -> None:
    remote, local = Remote(), Local()
    distributed = DistributedOptimizer(optim.Adam, remote.rrefs, lr=0.1, step_in_backward=in_backward)
    reference = optim.Adam(local.tensors, lr=0.1)
    schedules = [lr_scheduler.ReduceLROnPlateau(optimizer, patience=0) for optimizer in (distributed, reference)]
    for step in STEPS:
        remote.train(distributed, [step])
        local.train(reference, [step])
        for schedule in schedules:
            schedule.step(1.0)
    assert distributed.param_groups[0]["lr"] == reference.param_groups[0]["lr"] < 0.001
    assert_same(remote, local)


def test_groups_have_their_own_hyperparameters(group: Group, in_backward: bool) -> None:
    remote, local = Remote(), Local()

    def groups(parameters: list[Any]) -> list[dict[str, Any]]:
        return [{"params": parameters[::2]}, {"params": parameters[1::2], "lr": 0.2, "momentum": 0.5}]

    distributed = DistributedOptimizer(optim.SGD, groups(remote.rrefs), lr=0.01, step_in_backward=in_backward)
    reference = optim.SGD(groups(local.tensors), lr=0.01)
    for step in STEPS:
        remote.train(distributed, [step])
        local.train(reference, [step])
        for optimizer in (distributed, reference):
            optimizer.param_groups[1]["lr"] *= 0.7
    assert [group["lr"] for group in distributed.param_groups] == [group["lr"] for group in reference.param_groups]
    assert_same(remote, local)


def test_a_tensor_rate_can_be_scheduled(group: Group, in_backward: bool) -> None:
    remote, local = Remote(), Local()
    distributed = DistributedOptimizer(
        optim.Adam, remote.rrefs, lr=torch.tensor(0.1), foreach=False, capturable=False, step_in_backward=in_backward
    )
    reference = optim.Adam(local.tensors, lr=0.1, foreach=False)
    schedules = [lr_scheduler.ExponentialLR(optimizer, 0.5) for optimizer in (distributed, reference)]
    for step in STEPS:
        remote.train(distributed, [step])
        local.train(reference, [step])
        for schedule in schedules:
            schedule.step()
    assert_same(remote, local, tolerance=1e-6)  # 0.1 in single precision
