"""Find the importable name of a function, and the function of a name.

Functions are called by name where possible: only functions without an importable name are pickled by value.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch

from telegrad.errors import FunctionNotFound
from telegrad.interrupts import interruptible
from telegrad.wire.torchscript import PREFIX, find_script, script_name

_MISSING = object()


def function_name(function: Callable[..., object], *, main_by_name: bool = True) -> str | None:
    """Return "module:qualname" if that name resolves to exactly this object, else None.

    Nothing is cached between calls, so a name that was rebound to another object is never returned.

    >>> function_name(torch.add), function_name(lambda: None)
    ('torch:add', None)
    """
    if type(function) is FunctionType:  # most are: the short way, for names without a dot
        home, short = function.__module__, function.__qualname__
        loaded = sys.modules.get(home) if type(home) is str else None
        if loaded is not None and "." not in short and getattr(loaded, short, _MISSING) is function:
            return None if home == "__main__" and not main_by_name else f"{home}:{short}"
    if isinstance(function, torch.jit.ScriptFunction):
        return script_name(function)
    module = getattr(function, "__module__", None)
    name = getattr(function, "__name__", None)
    # the qualified name of torch.add is _VariableFunctionsClass.add
    path = name if type(function) is BuiltinFunctionType else getattr(function, "__qualname__", None)
    if not isinstance(module, str) or not isinstance(path, str) or _lookup(module, path) is not function:
        owner = getattr(function, "__self__", None)
        owner = owner if isinstance(owner, type) else getattr(function, "__objclass__", None)
        if not isinstance(owner, type):
            return None
        # A classmethod, or a method of a C type. Each access to a classmethod creates a new, equal object.
        module, path = owner.__module__, f"{owner.__qualname__}.{name}"
        if _lookup(module, path) != function:
            return None
    return None if module == "__main__" and not main_by_name else f"{module}:{path}"


def check_callable(function: object) -> None:
    """Raise a TypeError if this is not a function: often it is what the function returned.

    >>> check_callable(len)
    >>> check_callable(3)
    Traceback (most recent call last):
    ...
    TypeError: only functions can be called on a worker, not a value of type int: pass the function and its arguments \
separately, as in rpc_sync("worker1", f, (x,))
    """
    if not callable(function):
        raise TypeError(
            f"only functions can be called on a worker, not a value of type {type(function).__name__}: pass the "
            'function and its arguments separately, as in rpc_sync("worker1", f, (x,))'
        )


@interruptible
def resolve_function(name: str) -> Callable[..., Any]:
    """Return the function with that name ("module:qualname"), importing its module if necessary.

    Raise FunctionNotFound if the module or the attribute is missing.
    """
    if name.startswith(PREFIX):
        return find_script(name)
    module, _, path = name.partition(":")
    if "<" not in name:
        loaded = sys.modules.get(module)  # as `_lookup` does, with one call less
        found = _lookup(module, path) if loaded is None or "." in path else getattr(loaded, path, _MISSING)
        if callable(found):
            return found
    parts = [*module.split("."), *path.split(".")]
    if not all(part.isidentifier() for part in parts):
        raise FunctionNotFound(
            f"{name!r} is not a valid function name: it must have the form 'module:function', and the function must "
            "be defined at the top level of its module or in a class there",
            function=name,
        )
    try:
        # Even if the module is loaded: another thread may still be importing it, and this waits for it.
        importlib.import_module(module)
    except Exception as error:
        raise FunctionNotFound(
            f"function {path!r} not found: cannot import module {module!r}: {type(error).__name__}: {error}",
            function=name,
        ) from error
    found = _lookup(module, path)
    if found is _MISSING:
        raise FunctionNotFound(f"module {module!r} has no {path!r}", function=name)
    if not callable(found):
        raise FunctionNotFound(
            f"{path!r} of module {module!r} is a {type(found).__name__}, not a function", function=name
        )
    return found


def _lookup(module: str, path: str) -> object:
    """Return the object at a path in an imported module, or _MISSING."""
    found: object = sys.modules.get(module, _MISSING)
    if "." not in path and found is not _MISSING:
        return getattr(found, path, _MISSING)
    for part in path.split("."):
        if found is _MISSING:
            break
        found = getattr(found, part, _MISSING)
    return found
