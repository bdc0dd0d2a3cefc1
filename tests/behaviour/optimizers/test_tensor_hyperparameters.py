"""Hyperparameters that are tensors remain tensors, on the owners and in the local param_groups."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.support.trained_model import Group, Local, Remote, assert_same
from torch import optim

from telegrad.optim import DistributedOptimizer

seen: list[Any] = []


class Watched(optim.SGD):
    """Records its learning rate in each step."""

    def step(self, closure: Any = None) -> None:
        seen.extend(group["lr"] for group in self.param_groups)
        super().step()


@pytest.fixture(autouse=True)
def fresh() -> None:
    seen.clear()


def rate(value: float) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.double)


def test_owners_step_with_a_tensor_rate_before_and_after_a_change(group: Group, in_backward: bool) -> None:
    remote, local = Remote(), Local()
    distributed = DistributedOptimizer(Watched, remote.rrefs, lr=rate(0.1), step_in_backward=in_backward)
    reference = optim.SGD(local.tensors, lr=rate(0.1))
    for step in range(3):
        remote.train(distributed, [step])
        local.train(reference, [step])
        for optimizer in (distributed, reference):
            optimizer.param_groups[0]["lr"].mul_(0.5)
    assert_same(remote, local)
    assert seen
    assert all(isinstance(lr, torch.Tensor) and lr.dtype == torch.double for lr in seen)


def test_the_local_rate_is_the_users_tensor(group: Group, in_backward: bool) -> None:
    remote, local = Remote(), Local()
    given, reference_rate = rate(0.1), rate(0.1)
    distributed = DistributedOptimizer(optim.SGD, remote.rrefs, lr=given, step_in_backward=in_backward)
    reference = optim.SGD(local.tensors, lr=reference_rate)
    assert distributed.param_groups[0]["lr"] is given
    for step in range(2):
        given.fill_(0.1 / (step + 2))
        reference_rate.fill_(0.1 / (step + 2))
        remote.train(distributed, [step])
        local.train(reference, [step])
    assert_same(remote, local)


def test_a_tensor_rate_is_saved_and_loaded_as_a_tensor(group: Group) -> None:
    remote = Remote()
    distributed = DistributedOptimizer(Watched, remote.rrefs, lr=rate(0.1))
    saved = distributed.state_dict()
    assert isinstance(saved["param_groups"][0]["lr"], torch.Tensor)
    distributed.param_groups[0]["lr"].fill_(0.3)
    distributed.load_state_dict(saved)
    assert torch.equal(distributed.param_groups[0]["lr"], rate(0.1))
    remote.train(distributed, [0])
    assert all(isinstance(lr, torch.Tensor) and lr.item() == 0.1 for lr in seen)


def test_setting_the_rate_of_one_group_does_not_change_the_others(group: Group, in_backward: bool) -> None:
    remote, local = Remote(), Local()

    def groups(parameters: list[Any]) -> list[dict[str, Any]]:
        return [{"params": parameters[::2]}, {"params": parameters[1::2]}]

    distributed = DistributedOptimizer(optim.SGD, groups(remote.rrefs), lr=rate(0.1), step_in_backward=in_backward)
    reference = optim.SGD(groups(local.tensors), lr=rate(0.1))
    for optimizer in (distributed, reference):
        optimizer.param_groups[0]["lr"] = rate(0.02)
    remote.train(distributed, [0, 1])
    local.train(reference, [0, 1])
    assert_same(remote, local)
