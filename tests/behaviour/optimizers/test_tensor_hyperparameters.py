"""A hyperparameter that is a tensor stays one: for torch's optimizers on the owners, and for who looks at it here."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import optim

from support.trained_model import Group, Local, Remote, assert_same
from telegrad.optim import DistributedOptimizer

seen: list[Any] = []


class Watched(optim.SGD):
    """Notes what it finds as its rate in each step."""

    def step(self, closure: Any = None) -> None:
        seen.extend(group["lr"] for group in self.param_groups)
        super().step()


@pytest.fixture(autouse=True)
def fresh() -> None:
    seen.clear()


@pytest.fixture(params=[False, True])
def folded(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def rate(value: float) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.double)


def test_optimizers_on_the_owners_step_with_a_tensor_before_and_after_it_was_changed(
    group: Group, folded: bool
) -> None:
    remote, local = Remote(), Local()
    there = DistributedOptimizer(Watched, remote.rrefs, lr=rate(0.1), step_in_backward=folded)
    here = optim.SGD(local.tensors, lr=rate(0.1))
    for step in range(3):
        remote.train(there, [step])
        local.train(here, [step])
        for optimizer in (there, here):
            optimizer.param_groups[0]["lr"].mul_(0.5)
    assert_same(remote, local)
    assert seen
    assert all(isinstance(lr, torch.Tensor) and lr.dtype == torch.double for lr in seen)


def test_the_rate_shown_here_is_the_users_own_tensor_and_follows_it(group: Group, folded: bool) -> None:
    remote, local = Remote(), Local()
    given, given_here = rate(0.1), rate(0.1)
    there = DistributedOptimizer(optim.SGD, remote.rrefs, lr=given, step_in_backward=folded)
    here = optim.SGD(local.tensors, lr=given_here)
    assert there.param_groups[0]["lr"] is given
    for step in range(2):
        given.fill_(0.1 / (step + 2))
        given_here.fill_(0.1 / (step + 2))
        remote.train(there, [step])
        local.train(here, [step])
    assert_same(remote, local)


def test_a_saved_rate_is_a_tensor_and_is_loaded_as_one(group: Group) -> None:
    remote = Remote()
    there = DistributedOptimizer(Watched, remote.rrefs, lr=rate(0.1))
    saved = there.state_dict()
    assert isinstance(saved["param_groups"][0]["lr"], torch.Tensor)
    there.param_groups[0]["lr"].fill_(0.3)
    there.load_state_dict(saved)
    assert torch.equal(there.param_groups[0]["lr"], rate(0.1))
    remote.train(there, [0])
    assert all(isinstance(lr, torch.Tensor) and lr.item() == 0.1 for lr in seen)


def test_a_rate_set_for_one_group_leaves_the_others_alone(group: Group, folded: bool) -> None:
    remote, local = Remote(), Local()

    def groups(parameters: list[Any]) -> list[dict[str, Any]]:
        return [{"params": parameters[::2]}, {"params": parameters[1::2]}]

    there = DistributedOptimizer(optim.SGD, groups(remote.rrefs), lr=rate(0.1), step_in_backward=folded)
    here = optim.SGD(groups(local.tensors), lr=rate(0.1))
    for optimizer in (there, here):
        optimizer.param_groups[0]["lr"] = rate(0.02)
    remote.train(there, [0, 1])
    local.train(here, [0, 1])
    assert_same(remote, local)
