"""Optimizers that were made before a split."""

from __future__ import annotations

import gc
import warnings

import pytest
import torch
from tests.support.remote_nets import Group
from torch.optim.optimizer import _global_optimizer_pre_hooks

from telegrad.nn import split


def optimizer_hooks() -> list[object]:
    """Return the hooks that torch calls before each step of any optimizer."""
    return list(_global_optimizer_pre_hooks.values())


def test_an_optimizer_made_before_the_split_warns_when_it_steps(group: Group) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    split(model, {"1": "b"})
    with pytest.warns(UserWarning, match=r"made before split\(\).*1\.weight is on worker 'b' now.*") as said:
        optimizer.step()
    assert said[0].filename == __file__


def test_an_optimizer_of_what_stayed_does_not_warn(group: Group) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    split(model, {"1": "b"})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()


def test_torch_calls_no_hook_once_the_moved_parameters_are_freed(group: Group) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    split(model, {"1": "b"})
    assert optimizer_hooks()
    del optimizer
    gc.collect()
    assert not optimizer_hooks()
    split(model, {"0": "b"})
    gc.collect()
    assert not optimizer_hooks()
