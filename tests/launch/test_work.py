"""The work of a launcher's workers."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from telegrad import launch
from telegrad.options import Options


@pytest.mark.parametrize("args", [5, "abc", torch.ones(2), {"x": 1}])
def test_arguments_that_are_no_tuple_are_an_error_before_anything_starts(args: Any) -> None:
    with pytest.raises(TypeError, match=rf"args must be a tuple.*{type(args).__name__}: write \(x,\)"):
        launch.local(abs, 1, args)


def test_options_that_are_no_dict_are_an_error_before_anything_starts() -> None:
    options: Any = Options()
    with pytest.raises(TypeError, match=r"init_options must be a dict of keyword arguments of init_rpc.*Options"):
        launch.local(abs, 1, (1,), init_options=options)


def test_the_result_of_a_function_in_place_of_the_function_is_an_error() -> None:
    result: Any = os.getpid()
    with pytest.raises(TypeError, match="must be callable, but it is of type int"):
        launch.local(result, 1)
