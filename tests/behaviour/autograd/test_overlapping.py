"""In-place operations on overlapping tensors of one message do what they do in one process, or are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.support.one_process import (
    Group,
    all_gradients,
    assert_as_in_one_process,
    assert_equal,
    leaf,
    remotely,
    wanted_gradients,
)

from telegrad import autograd
from telegrad.errors import TelegradError

Pair = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def without_history(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    with torch.no_grad():
        return x, x[:2]


PAIRS: dict[str, Pair] = {
    "base and slice": lambda x: (x, x[:2]),
    "slice and base": lambda x: (x[1:3], x),
    "two names for one": lambda x: (x, x.view(2, 2)),
    "view and view": lambda x: (x[1:], x[1:][:2]),
    "strided": lambda x: (x, x[::2]),
    "transposed": lambda x: (x.view(2, 2).t(), x),
    "expanded": lambda x: (x, x[:1].expand(3)),
    "neither covers the other": lambda x: (x[:3], x[1:]),
    "one of several": lambda x: (x, x.chunk(2)[0]),
    "detached": lambda x: (x, x.detach()),
    "part without history": without_history,
    "detached leaf": lambda x: (x, x.detach().requires_grad_()),
    "another dtype": lambda x: (x, x.detach().view(torch.int64)),
}

REFUSED = ("neither covers the other", "one of several", "detached leaf", "another dtype")
"""Programs in which torch refuses in-place operations across workers."""


def read(one: torch.Tensor, two: torch.Tensor) -> torch.Tensor:
    return (one * one).sum() + (two * 3).sum()


def change_first(one: torch.Tensor, two: torch.Tensor) -> torch.Tensor:
    one.mul_(2)
    return read(one, two)


def change_second(one: torch.Tensor, two: torch.Tensor) -> torch.Tensor:
    two.mul_(2)
    return read(one, two)


def change_both(one: torch.Tensor, two: torch.Tensor) -> torch.Tensor:
    two.add_(1)
    one.mul_(one.detach().clone())
    two[:1].mul_(5)
    return read(one, two)


def change_what_is_saved(one: torch.Tensor, two: torch.Tensor) -> torch.Tensor:
    result = read(one, two)
    two.zero_()
    return result


def change_without_recording(one: torch.Tensor, two: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        two.mul_(2)
    return read(one, two)


def itself(*args: Any) -> Any:
    return args


@pytest.mark.parametrize("name", PAIRS)
def test_tensors_that_overlap_have_the_right_gradients_where_they_are_read(group: Group, name: str) -> None:
    x = leaf(4)
    assert_as_in_one_process(group, lambda call: call("b", read, *PAIRS[name](x * 1)), [x])
    assert_as_in_one_process(group, lambda call: read(*call("b", itself, *PAIRS[name](x * 1))), [x])


@pytest.mark.parametrize("there", [True, False])
@pytest.mark.parametrize(
    "change", [change_first, change_second, change_both, change_what_is_saved, change_without_recording]
)
@pytest.mark.parametrize("name", PAIRS)
def test_in_place_code_never_differs_silently(group: Group, name: str, change: Any, there: bool) -> None:
    x = leaf(4)

    def program(call: Any) -> torch.Tensor:
        pair = PAIRS[name](x * 1)
        result: torch.Tensor = call("b", change, *pair) if there else change(*call("b", itself, *pair))
        return result

    try:
        wanted = wanted_gradients(program, [x])
    except RuntimeError:
        wanted = None
    refused = ""
    with autograd.context() as context:
        try:
            context.backward(program(remotely))
        except RuntimeError as error:
            refused = str(error)
        got = all_gradients(group, context).get(x)
    if wanted is None:
        assert refused
    elif refused:
        assert name in REFUSED
        assert "is a view and" in refused
    else:
        assert_equal(got, wanted[0])


def test_where_one_process_records_in_place_operations_so_do_workers(group: Group) -> None:
    x = leaf(4)
    for name in ("base and slice", "slice and base", "two names for one", "view and view", "strided", "transposed"):
        for change in (change_first, change_second, change_both):
            assert_as_in_one_process(
                group, lambda call, name=name, change=change: call("b", change, *PAIRS[name](x * 1)), [x]
            )


def test_hooks_of_a_view_that_is_sent_with_its_base_are_called(group: Group) -> None:
    x = leaf(4)

    def program(call: Any) -> torch.Tensor:
        base = x * 1
        view = base[:2]
        view.register_hook(lambda grad: grad * 10)
        result: torch.Tensor = call("b", read, base, view)
        return result

    assert_as_in_one_process(group, program, [x])


def test_outside_a_context_tensors_that_overlap_arrive_as_leaves(group: Group) -> None:
    x = leaf(4) * 1
    base, view = remotely("b", itself, x, x[:2])
    assert base.is_leaf
    assert view.is_leaf
    assert_equal(view.detach(), base.detach()[:2])


def multiply(x: torch.Tensor, constant: torch.Tensor, parts: torch.Tensor) -> torch.Tensor:
    result = x * constant
    parts.zero_()
    return result


def test_autograd_notices_a_change_through_a_view_of_another_dtype(group: Group) -> None:
    x = leaf(3, dtype=torch.complex128)
    constant = torch.complex(torch.arange(1.0, 4.0), torch.ones(3)).to(torch.complex128)
    with autograd.context() as context:
        y = remotely("b", multiply, x, constant, torch.view_as_real(constant))
        with pytest.raises(TelegradError, match="modified by an inplace operation"):
            context.backward(y.abs().sum())
