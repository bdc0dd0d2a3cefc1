"""Keeps torch.compile out of modules: a call of any of their functions is a graph break, and runs uncompiled.

Remote calls send, wait and take locks, which a compiler cannot put into a graph. Dynamo would trace down to the
sockets and fail there. The functions are marked as torch.compiler.disable would mark them, but not wrapped, so an
ordinary call costs nothing, and dynamo, which takes seconds to load, is not loaded.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FunctionType, ModuleType

from telegrad.torch_private import break_graph_at, run_as_written

_REASON = "telegrad talks to other workers, which cannot be part of a compiled graph; compile what lies between calls"


def keep_uncompiled(name: str) -> None:
    """Mark the functions and methods of a module. It calls this at its end, with its ``__name__``."""
    module = sys.modules[name]
    for function in _functions(module, name):
        break_graph_at(function, _REASON)
        # A decorator's wrapper may have code of another module, such as contextlib, which others share.
        if function.__code__.co_filename == module.__file__:
            run_as_written(function.__code__)


def _functions(owner: ModuleType | type, module: str) -> Iterator[FunctionType]:
    for value in list(vars(owner).values()):
        inner = value
        if isinstance(value, staticmethod | classmethod):
            inner = value.__func__
        elif isinstance(value, property):
            inner = value.fget
        if isinstance(inner, FunctionType) and inner.__module__ == module:
            yield inner
        elif isinstance(value, type) and value.__module__ == module:
            yield from _functions(value, module)
