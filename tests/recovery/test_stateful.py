"""What is saved of an object is what another one needs to go on in its place."""

from __future__ import annotations

import enum
from collections import OrderedDict
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from telegrad.errors import TelegradError
from telegrad.recovery import stateful


def move(source: Any, target: Any) -> None:
    """Give `target` the state of `source`."""
    load(target, save(stateful.find(source)))


def save(found: stateful.Found) -> dict[str, Any]:
    return {key: stateful.save(value) for key, value in found.local.items()}


def load(target: Any, saved: dict[str, Any]) -> None:
    found = stateful.find(target).local
    assert found.keys() == saved.keys()
    for key, value in found.items():
        stateful.load(value, saved[key])


@dataclass
class Progress:
    best: float = 0.0
    name: str | None = None
    losses: list[float] = field(default_factory=list)
    layer: torch.nn.Linear = field(default_factory=lambda: torch.nn.Linear(2, 2))


def test_numbers_and_plain_data_are_part_of_the_state() -> None:
    one = Progress(0.25, "x", [1.0, 0.5])
    other = Progress()
    losses = other.losses
    move(one, other)
    assert (other.best, other.name, other.losses) == (0.25, "x", [1.0, 0.5])
    assert other.losses is losses
    one.losses.append(0.1)
    assert other.losses == [1.0, 0.5]
    assert torch.equal(other.layer.weight, one.layer.weight)


@pytest.mark.parametrize("make", [lambda **values: values, lambda **values: SimpleNamespace(**values)])
def test_entries_next_to_objects_are_set_in_their_container(make: Any) -> None:
    one = make(count=3, seen={"a", "b"}, table={}, layer=torch.nn.Linear(1, 1), mean=None, place=(0, 1))
    entries = one if isinstance(one, dict) else vars(one)
    found = stateful.find(one)
    other = make(count=0, seen=set(), table={"old": 1}, layer=torch.nn.Linear(1, 1), mean=None, place=(5, 6))
    entries["mean"] = torch.ones(2)
    entries["count"] += 1
    load(other, save(found))
    after = other if isinstance(other, dict) else vars(other)
    assert torch.equal(after.pop("mean"), torch.ones(2))
    del after["layer"]
    assert after == {"count": 4, "seen": {"a", "b"}, "table": {}, "place": (0, 1)}


def test_a_tensor_that_a_step_replaces_is_saved() -> None:
    one, other = SimpleNamespace(mean=torch.zeros(2)), SimpleNamespace(mean=torch.zeros(2))
    found = stateful.find(one)
    one.mean = one.mean * 0.9 + 1
    load(other, save(found))
    assert torch.equal(other.mean, torch.ones(2))
    one.mean = torch.ones(3, dtype=torch.double)
    load(other, save(found))
    assert torch.equal(other.mean, one.mean)
    one.mean = None
    load(other, save(found))
    assert other.mean is None


def test_an_object_in_the_place_of_a_number_is_refused() -> None:
    state = SimpleNamespace(best=None)
    found = stateful.find(state).local
    state.best = torch.nn.Linear(1, 1)
    with pytest.raises(TypeError, match=r"of state.best, now a Linear: create the object in the build function"):
        stateful.save(found["state"])


def test_constants_are_no_state() -> None:
    color = enum.Enum("color", ["RED"])
    constants = (torch.float32, torch.device("cpu"), Path("x"), color.RED, range(3), int, len, partial(max, 1), print)
    assert stateful.find((constants, 1, "x")).local == {}


def test_a_callable_object_without_state_dict_is_refused() -> None:
    class Average:
        total = 0.0

        def __call__(self, value: float) -> None:
            self.total += value

    with pytest.raises(TypeError, match=r"state\['average'\] is a Average, of which no snapshot can be taken"):
        stateful.find({"average": Average()})


def test_modules_keep_their_mode_and_which_parameters_are_frozen() -> None:
    one, other = (torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2)) for _ in range(2))
    one[1].eval()
    one[0].weight.requires_grad_(False)
    move(one, other)
    assert [each.training for each in other] == [True, False]
    assert [each.requires_grad for each in other.parameters()] == [False, True, True, True]


def test_tied_parameters_stay_tied() -> None:
    def tied() -> torch.nn.Module:
        model = torch.nn.Sequential(torch.nn.Linear(2, 2, bias=False), torch.nn.Linear(2, 2, bias=False))
        model[1].weight = model[0].weight
        return model

    one, other = tied(), tied()
    one[0].weight.grad = torch.ones(2, 2)
    move(one, other)
    assert other[0].weight is other[1].weight
    assert torch.equal(other[0].weight, one[0].weight)
    assert torch.equal(other[0].weight.grad, torch.ones(2, 2))  # type: ignore[arg-type] # it was saved


@pytest.mark.parametrize("other", [torch.nn.Linear(2, 2).double(), torch.nn.Linear(2, 3)], ids=["type", "shape"])
def test_a_parameter_that_does_not_fit_is_named(other: torch.nn.Module) -> None:
    with pytest.raises(TelegradError, match=r"^weight: a tensor of shape \[2, 2\] and type torch.float32 was saved"):
        move(torch.nn.Linear(2, 2), other)


def test_copies_of_ordered_dicts_do_not_share_tensors() -> None:
    model = torch.nn.BatchNorm1d(2)

    class Holder:
        def state_dict(self) -> Any:
            return model.state_dict()

        def load_state_dict(self, state: Any) -> None:
            model.load_state_dict(state)

    saved = stateful.save(Holder())
    assert type(saved) is OrderedDict
    assert saved._metadata == model.state_dict()._metadata  # type: ignore[attr-defined] # torch sets it
    with torch.no_grad():
        model.weight.zero_()
    stateful.load(Holder(), saved)
    assert torch.equal(model.weight, torch.ones(2))


def test_a_scaler_and_a_scheduler_go_on() -> None:
    def make() -> dict[str, Any]:
        parameter = torch.nn.Parameter(torch.ones(1))
        optimizer = torch.optim.SGD([parameter], lr=1.0)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1.0, total_steps=10)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1)
        return {"parameter": parameter, "optimizer": optimizer, "scheduler": scheduler, "scaler": scaler}

    def step(state: dict[str, Any]) -> None:
        state["scaler"].scale(state["parameter"].square().sum()).backward()
        state["scaler"].step(state["optimizer"])
        state["scaler"].update()
        state["scheduler"].step()
        state["optimizer"].zero_grad()

    one, other = make(), make()
    step(one)
    step(one)
    move(one, other)
    step(one)
    step(other)
    assert other["scaler"].get_scale() == one["scaler"].get_scale() == 64.0
    assert other["scheduler"].get_last_lr() == one["scheduler"].get_last_lr()
    assert torch.equal(other["parameter"], one["parameter"])


@pytest.mark.parametrize("dtype", [torch.double, torch.bfloat16])
def test_an_optimizer_goes_on_with_tensors_of_other_types_than_its_parameters(dtype: torch.dtype) -> None:
    def make() -> dict[str, Any]:
        parameter = torch.nn.Parameter(torch.ones(3, dtype=dtype))
        return {"parameter": parameter, "optimizer": torch.optim.NAdam([parameter], lr=0.1)}

    def step(state: dict[str, Any]) -> None:
        state["parameter"].grad = state["parameter"].detach() * 0.5
        state["optimizer"].step()

    one, other = make(), make()
    for _ in range(3):
        step(one)
    move(one, other)
    for state in (one, other):
        for _ in range(3):
            step(state)
    assert torch.equal(other["parameter"], one["parameter"])
    states = [next(iter(state["optimizer"].state.values())) for state in (one, other)]
    assert states[0]["mu_product"].dtype is torch.float32
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])
