"""Whatever a step does to the values in a container is saved, or is an error that says what is not."""

from __future__ import annotations

import enum
from collections import Counter, OrderedDict, UserDict, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy
import pytest
import torch

from telegrad.errors import TelegradError
from telegrad.recovery.containers import Container, is_value

Phase = enum.Enum("Phase", ["WARMUP", "MAIN"])
CONSTANTS = (enum.Enum, torch.dtype)
MODULE = torch.nn.Linear(1, 1)


class Pair(NamedTuple):
    one: int
    other: int


@dataclass
class Record:
    module: torch.nn.Module
    count: int = 0


def after(make: Callable[[], Any], step: Callable[[Any], object]) -> tuple[Any, Any]:
    """Return a container after a step, and another one that was given its state."""
    one, other = make(), make()
    container = Container(one, "state", CONSTANTS)
    step(one)
    Container(other, "state", CONSTANTS).load(container.save())
    return one, other


def assign(**values: Any) -> Callable[[Any], None]:
    return lambda holder: vars(holder).update(values)


@pytest.mark.parametrize(
    ("make", "step"),
    [
        (lambda: SimpleNamespace(seen=Counter()), lambda state: state.seen.update("aab")),
        (lambda: SimpleNamespace(seen=defaultdict(int)), lambda state: state.seen.update(a=1)),
        (lambda: SimpleNamespace(seen=OrderedDict()), lambda state: state.seen.update(a=1)),
        (lambda: SimpleNamespace(module=MODULE), assign(best=0.5)),
        (lambda: SimpleNamespace(best=0.5, last=1), lambda state: delattr(state, "best")),
        (lambda: SimpleNamespace(best=numpy.float64(0)), assign(best=numpy.float64(3))),
        (lambda: SimpleNamespace(best=0.0), assign(best=numpy.float32(0.1))),
        (lambda: SimpleNamespace(phase=Phase.WARMUP), lambda state: None),
        (lambda: SimpleNamespace(pair=(1, [2])), assign(pair=(3, [4], {"x": {5}}))),
        (lambda: SimpleNamespace(pair=[1]), assign(pair={1: 2})),
        (lambda: {"module": MODULE}, lambda state: state.update(best=0.5)),
        (lambda: {"first": 1, "second": 2}, lambda state: state.update(first=state.pop("first"))),
        (dict, lambda state: state.update({None: 1, 0: 2})),
        (lambda: UserDict(count=0), lambda state: state.update(count=1)),
        (lambda: [MODULE, 1], lambda state: state.append(2)),
        (lambda: [MODULE, 1], lambda state: state.pop()),
        (lambda: Record(MODULE), assign(count=2, name="added")),
    ],
)
def test_values_are_changed_added_and_removed(make: Callable[[], Any], step: Callable[[Any], object]) -> None:
    one, other = after(make, step)
    assert other == one
    entries = [list(vars(each) if isinstance(each, SimpleNamespace | Record) else each) for each in (one, other)]
    assert entries[0] == entries[1], "in the same order"
    if hasattr(one, "best"):
        assert type(other.best) is type(one.best)


def test_tensors_in_lists_and_dicts_are_values() -> None:
    def step(state: dict[str, Any]) -> None:
        state["history"].append(torch.ones(3))
        state["history"][0] += 1
        state["means"]["b"] = (torch.ones(1, dtype=torch.double), None)

    one, other = after(lambda: {"history": [torch.zeros(2)], "means": {"a": torch.zeros(1)}}, step)
    assert [each.tolist() for each in other["history"]] == [[1, 1], [1, 1, 1]]
    assert other["means"]["b"][0].dtype == torch.double
    assert list(other["means"]) == ["a", "b"]
    one["history"][0] += 1
    assert other["history"][0].tolist() == [1, 1], "it is a copy"


def test_what_exists_is_changed_in_place() -> None:
    other = SimpleNamespace(parameter=torch.zeros(2), losses=[torch.zeros(1)], seen=set(), table={"x": [0]})
    before = dict(vars(other))
    tensor = other.losses[0]
    one = SimpleNamespace(parameter=torch.ones(2), losses=[torch.ones(1)], seen={1}, table={"x": [1]})
    Container(other, "state", ()).load(Container(one, "state", ()).save())
    assert all(getattr(other, name) is value for name, value in before.items())
    assert other.losses[0] is tensor
    assert (other.parameter.tolist(), tensor.item(), other.seen, other.table) == ([1, 1], 1, {1}, {"x": [1]})


@pytest.mark.parametrize(
    ("make", "step", "message"),
    [
        (lambda: SimpleNamespace(x=None), assign(x=MODULE), r"of state.x, now a Linear: create the object in the bui"),
        (lambda: SimpleNamespace(x=MODULE), assign(x=torch.nn.Linear(1, 1)), r"state.x: a step has put another Linea"),
        (lambda: SimpleNamespace(x=Phase.WARMUP), assign(x=Phase.MAIN), r"state.x: a step has put another Phase ther"),
        (lambda: SimpleNamespace(x=Pair(1, 2)), assign(x=Pair(1, 3)), r"state.x: a step has put another Pair there"),
        (lambda: SimpleNamespace(x=MODULE), lambda state: delattr(state, "x"), r"without state.x, which a step has re"),
        (dict, lambda state: state.update({Phase.MAIN: 1}), r"of state\[<Phase.MAIN: 2>\], now a int"),
    ],
)
def test_objects_must_stay(make: Callable[[], Any], step: Callable[[Any], object], message: str) -> None:
    with pytest.raises(TypeError, match=f"no snapshot can be taken {message}|{message}"):
        after(make, step)


@pytest.mark.parametrize(
    ("saved", "built", "message"),
    [
        ({"best": 0.5}, {}, r"^state\['best'\] was saved, and the build function does not make it any more$"),
        ({"call": print}, {}, r"^state\['call'\] was saved, and the build function does not make it any more$"),
        ({}, {"best": 0.5}, r"^the build function makes state\['best'\], of which nothing was saved$"),
        ({}, {"call": print}, r"^the build function makes state\['call'\], of which nothing was saved$"),
        ({"x": print}, {"x": 1}, r"^state\['x'\] was an object when it was saved, and a plain value is built$"),
        ([1, 2], [1], r"^state\[1\] was saved, and the build function does not make it any more$"),
    ],
)
def test_the_state_of_another_build_function_is_refused(saved: Any, built: Any, message: str) -> None:
    share = Container(saved, "state", CONSTANTS).save()
    before = built.copy()
    with pytest.raises(TelegradError, match=message):
        Container(built, "state", CONSTANTS).load(share)
    assert built == before


def test_a_defaultdict_of_a_step_cannot_be_made_again() -> None:
    with pytest.raises(TelegradError, match="the default of a defaultdict that a step has created is unknown"):
        after(lambda: SimpleNamespace(table=None), assign(table=defaultdict(int)))


def test_an_enum_and_a_named_tuple_are_no_values() -> None:
    assert not is_value(Phase.MAIN)
    assert not is_value(Pair(1, 2))
    assert not is_value({torch.ones(1): 1}), "tensors are equal only to themselves"
    assert is_value([torch.ones(1), (True, 1j, b"x", None)])
