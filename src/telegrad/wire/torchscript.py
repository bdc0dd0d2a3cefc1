"""Pickle TorchScript functions by their name in torch's compilation unit, and modules as torch.jit.save writes them.

These names are not Python names: torch has its own table of compiled functions.
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
"""Prefix of the names of TorchScript functions."""


def script_name(function: Any) -> str:
    """Return the name of a TorchScript function, for `find_script` on a worker that can import the same module."""
    qualified: str = function.qualified_name
    return PREFIX + qualified.removeprefix("__torch__.")


def find_script(name: str) -> Callable[..., Any]:
    """Return the TorchScript function with that name, importing the module that compiles it if necessary.

    Pickled values refer to this function by name.
    """
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
    return found  # type: ignore[no-any-return]  # untyped in torch


def reducer_for(cls: type) -> Callable[[Any], tuple[object, ...]] | None:
    """Return the reducer for a class of TorchScript, or None for any other class."""
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
    """Return the TorchScript module that torch.jit.save wrote. Pickled values refer to this function by name."""
    return torch.jit.load(io.BytesIO(data))  # type: ignore[no-untyped-call]  # untyped in torch
