"""A parameter that is an argument by itself keeps its edge, also if its module is in the same message.

In the module it arrives as the receiver's own leaf. So the two must arrive as two tensors (which share their memory),
although they are one object here: a stand-in takes the place of the argument while the message is pickled.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import OrderedDict, defaultdict
from collections.abc import Container
from typing import Any

import torch

_DEPTH = 40


class Argument:
    """Stands for a tensor that is an argument by itself."""

    __slots__ = ("tensor",)

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def set_apart(value: Any, own: Container[int]) -> Any:
    """The value, with stand-ins for the tensors whose id is in `own` and that are in it by themselves.

    That is: in tuples, lists, dicts, sets and dataclasses. In other objects, such as an optimizer that is sent with its
    module, they stay those of the module. What has none in it is returned itself.
    """
    stand_ins: dict[int, Argument] = {}

    def replaced(part: Any, depth: int) -> Any:
        if isinstance(part, torch.Tensor):
            return stand_ins.setdefault(id(part), Argument(part)) if id(part) in own else part
        if depth > _DEPTH:
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
        object.__setattr__(made, name, item)  # it may be frozen
    return made


def _same(items: list[Any], others: list[Any]) -> bool:
    return all(item is other for item, other in zip(items, others, strict=True))
