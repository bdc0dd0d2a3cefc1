"""A parameter that is sent next to its module keeps its own edge."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any

import pytest
import torch
from tests.support.values import Batch, Pair, carried, sent
from torch import nn

from telegrad.wire.payload import encode
from telegrad.wire.standalone_arguments import StandaloneArgument, separate_arguments


@pytest.mark.parametrize(
    "pack",
    [
        lambda model: [model.weight, model],
        lambda model: (model, {"w": (model.weight,)}),
        lambda model: collections.OrderedDict(w=[model.weight], m=model),
        lambda model: Pair(model, Batch(model.weight, [model.weight])),
        lambda model: ({model}, frozenset([model.weight])),
    ],
)
def test_a_parameter_next_to_its_module_is_a_separate_attachment(pack: Any) -> None:
    model = nn.Linear(2, 2)
    encoded = encode(pack(model))
    assert [x is model.weight for x in encoded.attachments].count(True) == 2
    (argument,) = set(range(3)) - encoded.module_leaves
    assert encoded.attachments[argument] is model.weight
    assert type(carried(encoded)) is type(pack(model))


@dataclasses.dataclass(eq=False)
class ModuleOfFields(nn.Module):
    weight: nn.Parameter

    def __post_init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def __setattr__(self, name: str, value: Any) -> None:
        if "_parameters" in self.__dict__:
            super().__setattr__(name, value)


def test_the_fields_of_a_dataclass_module_are_not_arguments() -> None:
    encoded = encode([ModuleOfFields(nn.Parameter(torch.ones(1)))])
    assert encoded.module_leaves == {0}
    assert len(encoded.attachments) == 1


def test_a_list_that_contains_itself_and_a_module_round_trips() -> None:
    model = nn.Linear(2, 2)
    cycle: list[Any] = [model]
    cycle.append(cycle)
    received = sent(cycle)
    assert received[1] is received


def test_an_optimizer_that_is_sent_with_its_module_still_steps_it() -> None:
    model = nn.LSTM(2, 2)
    received, optimizer = sent([model, torch.optim.SGD(model.parameters(), lr=1.0)])
    assert optimizer.param_groups[0]["params"][0] is received.weight_ih_l0
    assert received._flat_weights[0] is received.weight_ih_l0


@dataclasses.dataclass(frozen=True)
class FrozenBatch:
    weight: torch.Tensor
    size: int = 3


def test_a_frozen_dataclass_is_copied_and_one_without_parameters_is_not() -> None:
    weight = nn.Parameter(torch.ones(2))
    plain, batch = Batch(torch.ones(2), []), FrozenBatch(weight)
    separated = separate_arguments([plain, batch], {id(weight)})
    assert separated[0] is plain
    assert isinstance(separated[1].weight, StandaloneArgument)
    assert (separated[1].size, batch.weight is weight) == (3, True)


def test_the_search_for_arguments_is_bounded() -> None:
    weight = nn.Parameter(torch.ones(2))
    deep: Any = [weight]
    for _ in range(60):
        deep = [deep]
    assert separate_arguments(deep, {id(weight)}) is deep


def test_other_objects_keep_the_parameters_of_their_module() -> None:
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight])
    assert separate_arguments(optimizer, {id(weight)}) is optimizer
