"""TorchScript functions go by the name that torch knows them by; TorchScript modules as torch.jit.save writes them.

Torch keeps a table of its own for what it has compiled, so the names here are no names of Python.
"""

from __future__ import annotations

import importlib
import io
from collections.abc import Callable
from typing import Any

import torch

from telegrad.errors import FunctionNotFound
from telegrad.torch_private import find_script_function

PREFIX = "__torch__:"
"""Begins the names of TorchScript functions."""


def script_name(function: Any) -> str:
    """The name of a TorchScript function, which `find_script` finds wherever the same module has been imported."""
    qualified: str = function.qualified_name
    return PREFIX + qualified.removeprefix("__torch__.")


def find_script(name: str) -> Callable[..., Any]:
    """The TorchScript function of that name. Imports the module that compiles it, if need be."""
    qualified = name.removeprefix(PREFIX)
    found: Any = find_script_function(f"__torch__.{qualified}")
    module = qualified.rpartition(".")[0]
    if found is None and module and all(part.isidentifier() for part in module.split(".")):
        try:
            importlib.import_module(module)
        except Exception as error:
            raise FunctionNotFound(
                f"TorchScript function {qualified!r} is not compiled here, and module {module!r} cannot be imported: "
                f"{type(error).__name__}: {error}",
                function=name,
            ) from error
        found = find_script_function(f"__torch__.{qualified}")
    if found is None:
        raise FunctionNotFound(f"TorchScript function {qualified!r} is not compiled here", function=name)
    return found  # type: ignore[no-any-return]  # torch has no types for it


def reducer_for(cls: type) -> Callable[[Any], tuple[object, ...]] | None:
    """How pickle writes what TorchScript made of a class; None for every other class."""
    if issubclass(cls, torch.jit.ScriptModule):
        return _reduce_module
    return _reduce_function if issubclass(cls, torch.jit.ScriptFunction) else None


def _reduce_function(function: Any) -> tuple[object, ...]:
    return find_script, (script_name(function),)


def _reduce_module(module: Any) -> tuple[object, ...]:
    file = io.BytesIO()
    torch.jit.save(module, file)
    return load_script_module, (file.getvalue(),)


def load_script_module(data: bytes) -> object:
    """The TorchScript module that torch.jit.save wrote."""
    return torch.jit.load(io.BytesIO(data))  # type: ignore[no-untyped-call]  # torch has no types for it
