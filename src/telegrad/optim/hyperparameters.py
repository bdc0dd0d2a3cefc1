"""Learning rates and the like: what `param_groups` holds beside the parameters, as it travels between workers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

Hyperparameters = dict[str, Any]
_NUMBERS = (float, bool, int, type(None))
_ABSENT = object()


def plain(group: Mapping[str, Any]) -> Hyperparameters:
    """A copy of a group without its parameters."""
    found = {}
    for key, value in group.items():
        if key != "params":
            found[key] = value if type(value) in _NUMBERS else _plain(value)
    return found


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    return list(value) if isinstance(value, list) else value


def with_given_tensors(group: Hyperparameters, *given: Mapping[str, Any]) -> Hyperparameters:
    """A group with the tensors that the user gave, so that a later change of them is one of the group."""
    return {
        key: next((own[key] for own in given if isinstance(own.get(key), torch.Tensor)), value)
        if isinstance(value, torch.Tensor)
        else value
        for key, value in group.items()
    }


def separate(groups: Iterable[dict[str, Any]]) -> None:
    """Give each group tensors of its own: torch lets groups share a default, and here each is set by itself."""
    seen: set[int] = set()
    for group in groups:
        for key, value in group.items():
            if isinstance(value, torch.Tensor):
                if id(value) in seen:
                    value = group[key] = value.detach().clone()
                seen.add(id(value))


@dataclass
class _Numbers:
    """A tensor as numbers."""

    dtype: str
    values: Any


def without_tensors(values: Hyperparameters) -> Hyperparameters:
    """These with tensors as numbers, for where tensors cannot go."""
    return {
        key: _Numbers(str(value.dtype).removeprefix("torch."), value.tolist())
        if isinstance(value, torch.Tensor)
        else value
        for key, value in values.items()
    }


def with_tensors(values: Hyperparameters) -> Hyperparameters:
    """What `without_tensors` was given."""
    return {
        key: torch.tensor(value.values, dtype=getattr(torch, value.dtype)) if isinstance(value, _Numbers) else value
        for key, value in values.items()
    }


class Dirty:
    """Which hyperparameters somebody has changed here, of groups that live elsewhere.

    Only these are pushed: an optimizer may change others itself, where it is.
    """

    def __init__(self, groups: Sequence[Mapping[str, Any]]) -> None:
        self._before = [plain(group) for group in groups]
        self._keys: list[set[str]] = [set() for _ in groups]

    def values(self, groups: Sequence[Mapping[str, Any]]) -> dict[int, Hyperparameters]:
        """Group -> the current values of what was changed in it at any time."""
        found = {}
        for number, (group, before, keys) in enumerate(zip(groups, self._before, self._keys, strict=True)):
            now = plain(group)
            for key, value in now.items():
                there = before.get(key, _ABSENT)
                if value is not there and not same(value, there):
                    keys.add(key)
            if keys:
                found[number] = {key: now[key] for key in keys if key in now}
        return found


def same(one: Any, other: Any) -> bool:
    """Whether two hyperparameters, or dicts of them, are equal; tensors by value."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(value, other[key]) for key, value in one.items())
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return (
            isinstance(one, torch.Tensor)
            and isinstance(other, torch.Tensor)
            and one.dtype == other.dtype
            and torch.equal(one, other)
        )
    return type(one) is type(other) and bool(one == other)


def put(group: dict[str, Any], values: Hyperparameters) -> None:
    """Set values in a group. A tensor stays the tensor that it is, since others may hold it, and gets the value."""
    for key, value in values.items():
        there = group.get(key)
        if isinstance(there, torch.Tensor) and isinstance(value, int | float) and not isinstance(value, bool):
            with torch.no_grad():
                there.fill_(value)
        elif isinstance(there, torch.Tensor) and isinstance(value, torch.Tensor) and _fits(there, value):
            with torch.no_grad():
                there.copy_(value)
        else:
            group[key] = value


def _fits(there: torch.Tensor, value: torch.Tensor) -> bool:
    return there.shape == value.shape and there.dtype == value.dtype
