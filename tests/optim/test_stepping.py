"""Steps with and without torch's wrapper."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import SGD, Optimizer
from torch.optim import optimizer as torch_optimizer

from telegrad.optim.stepping import run_step

NAME = "Optimizer.step#SGD.step"


def make_optimizer() -> SGD:
    weight = torch.ones(3, requires_grad=True)
    weight.grad = torch.ones(3)
    return SGD([weight], lr=0.5)


def value(optimizer: Optimizer) -> list[float]:
    found: list[float] = optimizer.param_groups[0]["params"][0].tolist()
    return found


def test_a_step_without_a_profiler_is_not_annotated(monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = make_optimizer()
    monkeypatch.setattr(torch.autograd.profiler, "record_function", None)  # called by the wrapper
    run_step(optimizer)
    assert value(optimizer) == [0.5] * 3
    with pytest.raises(TypeError):
        optimizer.step()


def test_a_step_under_a_profiler_is_annotated() -> None:
    optimizer = make_optimizer()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        run_step(optimizer)
    assert NAME in {event.key for event in profile.key_averages()}


@pytest.mark.parametrize(
    "register",
    [
        Optimizer.register_step_pre_hook,
        Optimizer.register_step_post_hook,
        lambda _, hook: torch_optimizer.register_optimizer_step_pre_hook(hook),
        lambda _, hook: torch_optimizer.register_optimizer_step_post_hook(hook),
    ],
)
def test_step_hooks_run(register: Callable[[Optimizer, Callable[..., None]], Any]) -> None:
    optimizer, calls = make_optimizer(), []
    handle = register(optimizer, lambda *_: calls.append(1))
    run_step(optimizer)
    handle.remove()
    run_step(optimizer)
    assert calls == [1]
    assert value(optimizer) == [0.0] * 3


def test_a_step_assigned_to_the_object_is_called() -> None:
    optimizer, calls = make_optimizer(), []
    optimizer.step = lambda: calls.append(1)  # type: ignore[method-assign, assignment]
    run_step(optimizer)
    assert calls == [1]


def test_the_step_of_another_class_is_called() -> None:
    class Mine:
        def __init__(self) -> None:
            self.calls = 0

        def step(self) -> None:
            self.calls += 1

    mine: Any = Mine()
    run_step(mine)
    assert mine.calls == 1


def test_a_step_wrapped_by_others_is_called() -> None:
    calls = []

    def wrapped(step: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(step)
        def wrapper(*args: Any) -> Any:
            calls.append(1)
            return step(*args)

        return wrapper

    make_optimizer()  # makes torch wrap SGD.step; functools.wraps copies its marker

    class Mine(SGD):
        step = wrapped(SGD.step)  # type: ignore[assignment]

    mine = Mine(make_optimizer().param_groups[0]["params"], lr=0.5)
    run_step(mine)
    assert calls == [1]
