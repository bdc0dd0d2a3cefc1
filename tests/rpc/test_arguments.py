"""Arguments that are not tuples, which a call would take apart without a word."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from telegrad import nn, rpc
from telegrad.rpc.api import acting_as
from telegrad.testing.group import local_group


@pytest.fixture
def call() -> Iterator[Callable[..., Any]]:
    with local_group(["a", "b"]) as group, acting_as(group["a"]):
        yield lambda *args: rpc.rpc_sync("b", *args)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (torch.ones(2), r"not a Tensor: write \(x,\)"),
        (torch.tensor(0.0), r"not a Tensor: write \(x,\)"),
        (torch.nn.ModuleList([torch.nn.Tanh()]), "not a ModuleList"),
        (3, r"not an int: write \(3,\)"),
        (0, r"not an int: write \(0,\)"),
        ("abc", r"not a str: write \('abc',\)"),
        ({"x": 1}, "not a dict.*or kwargs=x"),
        ({1}, "not a set"),
    ],
)
def test_a_value_instead_of_a_tuple_is_an_error_that_shows_the_tuple(
    call: Callable[..., Any], value: Any, said: str
) -> None:
    for function in (rpc.rpc_sync, rpc.rpc_async, rpc.remote, nn.RemoteModule):
        with pytest.raises(TypeError, match=f"args must be a tuple.*{said}"):
            function("b", torch.nn.Tanh, value)
    with pytest.raises(TypeError, match=f"args must be a tuple.*{said}"):
        rpc.call_all(torch.neg, value)


def test_lists_tuples_and_iterators_are_arguments(call: Callable[..., Any]) -> None:
    assert call(max, [1, 2]) == call(max, (1, 2)) == call(max, iter([1, 2])) == call(max, range(3)) == 2
    assert call(dict) == call(dict, ()) == call(dict, None, {}) == {}


def test_keyword_arguments_that_are_no_dict_are_an_error(call: Callable[..., Any]) -> None:
    with pytest.raises(TypeError, match="kwargs must be a dict of the function's keyword arguments, not an int"):
        call(max, (1,), 2)


def test_a_value_instead_of_a_function_is_an_error_before_anything_is_sent(call: Callable[..., Any]) -> None:
    with pytest.raises(TypeError, match=r"not a value of type int: pass the function and its arguments separately"):
        call(max(1, 2))


@pytest.mark.parametrize(
    ("workers", "said"),
    [("b", r"not a str: write \['b'\]"), (1, r"not an int: write \[1\]"), (rpc.WorkerInfo("b", 1), "not a WorkerInfo")],
)
def test_one_worker_instead_of_a_list_is_an_error_that_shows_the_list(workers: Any, said: str) -> None:
    with local_group(["a", "b"]) as group, acting_as(group["a"]):
        for function in (
            lambda: rpc.call_all(max, (1, 2), workers=workers),
            lambda: rpc.barrier(workers),
            lambda: rpc.all_gather(1, workers),
            lambda: rpc.broadcast(1, "a", workers),
        ):
            with pytest.raises(TypeError, match=f"workers must be a list of workers, {said}"):
                function()
        assert rpc.call_all(max, (1, 2), workers=["b"]) == {"b": 2}
