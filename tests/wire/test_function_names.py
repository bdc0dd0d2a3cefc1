"""Importable functions are found by name, and others have no name."""

from __future__ import annotations

import math
import operator
import pickle
import sys
from typing import Any

import pytest
import torch
from tests.support.values import Holder, Inheriting, module_level
from torch import nn

from telegrad.errors import FunctionNotFound
from telegrad.wire.function_names import check_callable, function_name, resolve_function


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (torch.add, "torch:add"),
        (torch.nn.functional.relu, "torch.nn.functional:relu"),
        (torch.linalg.inv, "torch._C._linalg:linalg_inv"),
        (torch.Tensor.add, "torch._C:TensorBase.add"),
        (torch.Tensor.backward, "torch._tensor:Tensor.backward"),
        (operator.mul, "_operator:mul"),
        (math.sqrt, "math:sqrt"),
        (len, "builtins:len"),
        (dict.fromkeys, "builtins:dict.fromkeys"),
        (nn.Linear, "torch.nn.modules.linear:Linear"),
        (module_level, f"{module_level.__module__}:module_level"),
        (Holder, f"{Holder.__module__}:Holder"),
        (Holder.static, f"{Holder.__module__}:Holder.static"),
        (Holder.method, f"{Holder.__module__}:Holder.method"),
        (Holder.make, f"{Holder.__module__}:Holder.make"),
        (Inheriting.make, f"{Holder.__module__}:Inheriting.make"),
        (Inheriting.static, f"{Holder.__module__}:Holder.static"),
    ],
)
def test_importable_functions_have_a_name_that_resolves_to_them(function: Any, name: str) -> None:
    assert function_name(function) == name
    assert resolve_function(name) == function


@pytest.mark.parametrize(
    "function",
    [lambda: None, Holder().method, nn.Linear(1, 1), [].append, operator.itemgetter(1), torch.ops.aten.add, pickle],
)
def test_functions_that_cannot_be_imported_have_no_name(function: Any) -> None:
    def local() -> None: ...

    assert function_name(function) is None
    assert function_name(local) is None


def test_a_name_that_was_rebound_is_not_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    original = module_level
    assert function_name(original) is not None
    monkeypatch.setattr(sys.modules[original.__module__], "module_level", lambda x: x)
    assert function_name(original) is None


def test_resolving_imports_the_module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    assert resolve_function("colorsys:rgb_to_hsv")(0, 0, 0) == (0.0, 0.0, 0)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_such.module:f", "cannot import module 'no_such.module'"),
        ("math:no.such", "module 'math' has no 'no.such'"),
        ("math:nothing.__class__", "module 'math' has no"),
        ("math:pi", "is a float"),
        ("math", "must have the form 'module:function'"),
        (":sqrt", "must have the form 'module:function'"),
        ("math:", "must have the form 'module:function'"),
        ("math:a..b", "must have the form 'module:function'"),
        (".math:sqrt", "must have the form 'module:function'"),
        ("math:f.<locals>.g", "must have the form 'module:function'"),
        ("math:sqrt:x", "must have the form 'module:function'"),
        ("", "must have the form 'module:function'"),
    ],
)
def test_the_error_of_resolving_names_what_is_missing(name: str, message: str) -> None:
    with pytest.raises(FunctionNotFound, match=message) as caught:
        resolve_function(name)
    assert caught.value.function == name


def test_a_classmethod_of_a_class_that_cannot_be_imported_has_no_name() -> None:
    class Local:
        @classmethod
        def make(cls) -> None: ...

    assert function_name(Local.make) is None


def test_a_value_is_not_a_function() -> None:
    check_callable(len)
    with pytest.raises(TypeError, match="not a value of type int: pass the function and its arguments separately"):
        check_callable(3)
