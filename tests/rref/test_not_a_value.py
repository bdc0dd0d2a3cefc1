"""Using a reference as if it were its value."""

from __future__ import annotations

import operator
from collections.abc import Callable, Container, Iterable, Sized
from typing import Any

import pytest
import torch
from tests.support.rrefs import Group

from telegrad import rpc
from telegrad.rref.handle import RRef


def unpack(rref: Any) -> None:
    _first, _second = rref


@pytest.mark.parametrize(
    ("use", "what", "method"),
    [
        (lambda rref: rref[0], "has no items", "__getitem__"),
        (lambda rref: operator.setitem(rref, 0, 1), "has no items", "__setitem__"),
        (lambda rref: 1 in rref, "has no items", "__getitem__"),
        (list, "has no items", "__getitem__"),
        (unpack, "has no items", "__getitem__"),
        (lambda rref: rref + 1, "is no operand of +", "__add__"),
        (lambda rref: 1 + rref, "is no operand of +", "__radd__"),
        (lambda rref: torch.ones(1) * rref, "is no operand of *", "__rmul__"),
        (lambda rref: rref < 1, "is no operand of <", "__lt__"),
        (float, "is no number", "__float__"),
    ],
)
def test_an_operator_is_an_error_that_says_how_to_reach_the_value(
    group: Group, use: Callable[[Any], Any], what: str, method: str
) -> None:
    rref = rpc.remote("b", list, ([1, 2],))
    with pytest.raises(TypeError) as caught:
        use(rref)
    said = str(caught.value)
    assert said.startswith(f"{rref!r} is a reference, which {what}: rref.rpc_sync().{method}(...) calls the method")
    assert said.endswith("rref.to_here() is a copy of it")


def test_the_method_that_the_error_names_works(group: Group) -> None:
    rref = rpc.remote("b", list, ([1, 2],))
    assert rref.rpc_sync().__getitem__(1) == 2
    assert rref.rpc_sync().__len__() == 2


def test_on_the_owner_the_value_itself_is_named(group: Group) -> None:
    with pytest.raises(TypeError, match=r"rref\.local_value\(\) is the value itself"):
        RRef([1])[0]


def test_a_program_that_flattens_nested_arguments_leaves_references_as_they_are(group: Group) -> None:
    rref = rpc.remote("b", list)
    assert not isinstance(rref, Iterable | Sized | Container)


def test_a_reference_is_true_and_can_be_kept_in_sets_and_compared(group: Group) -> None:
    rref = rpc.remote("b", list)
    assert rref
    assert rref in {rref}
    assert rref == rref
    assert rref != 1
