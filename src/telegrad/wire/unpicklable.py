"""Explain why a value cannot be pickled or unpickled."""

from __future__ import annotations

import contextlib
import reprlib
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType, MethodType
from typing import NoReturn

import torch
import torch.fx

from telegrad.errors import PayloadError

# Every attempt pickles a part again, so depth and number of attempts are bounded.
_MAX_DEPTH = 40
_MAX_ATTEMPTS = 5000
_ATOMS = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)


def find_unpicklable(value: object, root: str | tuple[str, ...], pickle: Callable[[object], object]) -> str:
    """Return the path of the smallest part for which `pickle` raises, as in ``kwargs['model'].lock``.

    ``root`` is the name of the value, or one name for each element of a tuple. No user code runs except in `pickle`.
    """
    attempts = 0
    seen: set[int] = set()

    def fails(part: object) -> bool:
        nonlocal attempts
        if isinstance(part, _ATOMS) or attempts >= _MAX_ATTEMPTS:
            return False
        attempts += 1
        try:
            pickle(part)
        except Exception:  # noqa: BLE001  # any error means that this part fails
            return True
        return False

    def smallest(part: object, path: str, depth: int) -> str | None:
        """Return None if the part fails only because of a cycle back to a part that is being searched."""
        seen.add(id(part))
        failing = [(step, child) for step, child in _named_parts(part) if fails(child)] if depth < _MAX_DEPTH else []
        for step, child in failing:
            found = smallest(child, path + step, depth + 1) if id(child) not in seen else None
            if found is not None:
                return found
        return None if failing else path

    names = [root] if isinstance(root, str) else root
    for name, part in zip(names, [value] if isinstance(root, str) else value, strict=False):  # type: ignore[call-overload]  # a tuple
        if fails(part):
            return smallest(part, name, 0) or name
    return " or ".join(names)


def _named_parts(value: object) -> Iterator[tuple[str, object]]:
    """Yield each named part of a value, after the suffix that it adds to the path."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield f"[{reprlib.repr(key)}]", item
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield f"[{index}]", item
    if isinstance(value, FunctionType):
        yield from _variables_of(value)
    elif isinstance(value, MethodType):
        yield ".__self__", value.__self__
    cls = type(value)
    if cls.__reduce_ex__ is object.__reduce_ex__ and cls.__getstate__ is object.__getstate__:
        state = object.__getstate__(value)
        for attributes in state if isinstance(state, tuple) else (state,):
            for name, item in (attributes or {}).items():
                yield f".{name}", item


def _variables_of(function: FunctionType) -> Iterator[tuple[str, object]]:
    """Yield what a function that is sent by value takes along: the variables around it, and the globals it uses."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # not assigned yet
            yield f"'s variable {name!r}", cell.cell_contents
    for name in sorted(_names_in(function.__code__)):
        if name in function.__globals__:
            yield f"'s global {name!r}", function.__globals__[name]


def _names_in(code: CodeType) -> set[str]:
    """Return the names of globals and attributes in a function and in the functions inside it."""
    return set(code.co_names).union(*(_names_in(inner) for inner in code.co_consts if isinstance(inner, CodeType)))


def missing_in_main(error: Exception) -> str:
    """Return the remedy for an error that says that ``__main__`` of this worker lacks a class or function.

    >>> missing_in_main(AttributeError("Can't get attribute 'Config' on <module '__main__' from 'train.py'>"))
    '. The script of the worker that received it has not defined it yet, or never does: define it before init_rpc()'
    """
    if isinstance(error, AttributeError) and "'__main__'" in str(error):
        where = "The script of the worker that received it"
        return f". {where} has not defined it yet, or never does: define it before init_rpc()"
    return ""


def refuse_fx_proxy(proxy: torch.fx.Proxy) -> NoReturn:
    """Raise: torch.fx traces the caller, so the argument has no value."""
    raise PayloadError(
        f"torch.fx is tracing this code, and {proxy} is a placeholder for a value that does not exist yet. Make the "
        "call in a function that is wrapped with torch.fx.wrap, or in a leaf module of the tracer"
    )
