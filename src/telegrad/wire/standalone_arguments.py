"""Keep the autograd edge of a parameter that is an argument itself while its module is in the same message.

In the module, the parameter becomes a leaf of the receiver. So one tensor must be received as two tensors that share
their memory. While the message is pickled, a stand-in replaces the argument.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import OrderedDict, defaultdict
from collections.abc import Container
from typing import Any

import torch

_MAX_DEPTH = 40


class StandaloneArgument:
    """Stand-in for a tensor that is an argument itself."""

    __slots__ = ("tensor",)

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def separate_arguments(value: Any, module_tensors: Container[int]) -> Any:
    """Return the value with stand-ins for tensors whose id is in `module_tensors` and that are arguments themselves.

    Those are the ones in tuples, lists, dicts, sets and dataclasses. In other objects, such as an optimizer that is
    sent with its module, they remain the module's. Parts without such tensors are not copied.
    """
    stand_ins: dict[int, StandaloneArgument] = {}

    def replaced(part: Any, depth: int) -> Any:
        if isinstance(part, torch.Tensor):
            return stand_ins.setdefault(id(part), StandaloneArgument(part)) if id(part) in module_tensors else part
        if depth > _MAX_DEPTH:
            return part
        cls = type(part)
        if cls in (tuple, list, set, frozenset):
            items = [replaced(item, depth + 1) for item in part]
            return part if _same(items, list(part)) else cls(items)
        if isinstance(part, tuple) and hasattr(cls, "_fields"):
            items = [replaced(item, depth + 1) for item in part]
            return part if _same(items, list(part)) else tuple.__new__(cls, items)
        if cls in (dict, OrderedDict, defaultdict):
            items = [replaced(item, depth + 1) for item in part.values()]
            if _same(items, list(part.values())):
                return part
            made = copy.copy(part)
            for key, item in zip(part, items, strict=True):
                made[key] = item
            return made
        if dataclasses.is_dataclass(cls) and not isinstance(part, torch.nn.Module):
            return _with_fields(
                part, {f.name: replaced(getattr(part, f.name, None), depth + 1) for f in dataclasses.fields(cls)}
            )
        return part

    return replaced(value, 0)


def _with_fields(part: Any, fields: dict[str, Any]) -> Any:
    changed = {name: item for name, item in fields.items() if item is not getattr(part, name, None)}
    if not changed:
        return part
    made = copy.copy(part)
    for name, item in changed.items():
        object.__setattr__(made, name, item)  # the dataclass may be frozen
    return made


def _same(items: list[Any], others: list[Any]) -> bool:
    return all(item is other for item, other in zip(items, others, strict=True))
