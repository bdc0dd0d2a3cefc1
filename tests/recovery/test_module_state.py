"""Modules get the buffers back that another one had, whatever steps have done with them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from telegrad.errors import TelegradError
from telegrad.recovery import module_state


class Memory(torch.nn.Module):
    """A module whose buffers change."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", None)
        self.register_buffer("history", torch.zeros(0))
        self.register_buffer("step", torch.zeros(1), persistent=False)
        self.weight = torch.nn.Parameter(torch.zeros(2))
        self.register_parameter("bias", None)


def move(one: torch.nn.Module, other: torch.nn.Module) -> None:
    module_state.load(other, module_state.save(one, lambda state: state), lambda state: state)


def test_buffers_may_grow_appear_and_disappear() -> None:
    one: Any = torch.nn.Sequential(Memory())
    other: Any = torch.nn.Sequential(Memory())
    one[0].mean, one[0].history, one[0].step = torch.ones(2), torch.arange(3), None
    move(one, other)
    assert torch.equal(other[0].mean, one[0].mean)
    assert torch.equal(other[0].history, one[0].history)
    assert other[0].step is None
    assert dict(other.named_buffers()).keys() == {"0.mean", "0.history"}
    one[0].mean += 1
    assert other[0].mean.tolist() == [1, 1], "it is a copy"


def test_a_buffer_that_fits_remains_the_same_tensor() -> None:
    one, other = torch.nn.BatchNorm1d(2), torch.nn.BatchNorm1d(2)
    one(torch.rand(4, 2))
    before = other.running_mean
    move(one, other)
    assert other.running_mean is before
    assert torch.equal(other.running_mean, one.running_mean)  # type: ignore[arg-type] # it has one


def test_a_parameter_or_buffer_that_a_step_registers_is_named() -> None:
    one = Memory()
    one.bias = torch.nn.Parameter(torch.zeros(1))
    one.register_buffer("late", torch.zeros(1))
    with pytest.raises(TelegradError, match=r"a Memory was built with other parameters or buffers .*: bias, late$"):
        move(one, Memory())


def test_a_module_without_values_is_named() -> None:
    lazy = torch.nn.Sequential(torch.nn.LazyLinear(2))
    with pytest.raises(TypeError, match=r"^0.weight: no snapshot can be taken of a parameter that is not initialized"):
        module_state.save(lazy, lambda state: state)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_a_scripted_module_has_state() -> None:
    one, other = (torch.jit.script(torch.nn.BatchNorm1d(2)) for _ in range(2))
    one(torch.rand(4, 2))
    move(one, other)
    assert torch.equal(other.running_mean, one.running_mean)
