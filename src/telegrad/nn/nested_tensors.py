"""Moves or changes the tensors inside nested lists, tuples, sets, dicts and dataclasses."""

from __future__ import annotations

import copy
import dataclasses
from collections import UserDict
from collections.abc import Callable, Container
from typing import Any

import torch


def move_tensors(value: Any, device: str | torch.device, keep: Container[str] = ()) -> Any:
    """Return the value with its tensors on the device, except those on the devices to `keep`."""
    # Meta tensors have no data to move.
    return map_tensors(
        value, lambda tensor: tensor if tensor.is_meta or (keep and str(tensor.device) in keep) else tensor.to(device)
    )


def map_tensors(value: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return the value with a function applied to its tensors."""
    return _map(value, function, set())


def _map(value: Any, function: Callable[[torch.Tensor], torch.Tensor], ancestors: set[int]) -> Any:
    """Map a value. `ancestors` are the ids of the containers around it; one that contains itself is not followed."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if not isinstance(value, list | set | frozenset | tuple | dict | UserDict) and not _is_dataclass(value):
        return value
    if id(value) in ancestors:
        return value
    ancestors.add(id(value))
    try:
        return _rebuild(value, lambda item: _map(item, function, ancestors))
    finally:
        ancestors.discard(id(value))


def _is_dataclass(value: object) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type | torch.nn.Module)


def _rebuild(value: Any, change: Callable[[Any], Any]) -> Any:
    kind = type(value)
    if kind in (list, set, frozenset):
        return kind(change(item) for item in value)
    if isinstance(value, tuple):
        parts = [change(item) for item in value]
        return kind(*parts) if hasattr(value, "_fields") else kind(parts)
    items = list(value.items()) if isinstance(value, dict | UserDict) else []
    fields = []
    if _is_dataclass(value):  # a dict may be one, too
        fields = [(field.name, getattr(value, field.name, None)) for field in dataclasses.fields(value)]
    changed = [(key, new) for key, item in items if (new := change(item)) is not item]
    changed_fields = [(name, new) for name, item in fields if (new := change(item)) is not item]
    if not changed and not changed_fields:
        return value
    result: Any = copy.copy(value)
    for key, new in changed:
        result[key] = new
    for name, new in changed_fields:
        object.__setattr__(result, name, new)
    return result
