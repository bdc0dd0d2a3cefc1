"""Hyperparameters: what `param_groups` holds besides the parameters, and how it is sent between workers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

Hyperparameters = dict[str, Any]
_NUMBERS = (float, bool, int, type(None))
_ABSENT = object()


def hyperparameters_of(group: Mapping[str, Any]) -> Hyperparameters:
    """Return a copy of a parameter group without its parameters, with tensors on the CPU: it may be sent."""
    found = {}
    for key, value in group.items():
        if key != "params":
            found[key] = value if type(value) in _NUMBERS else _copy(value)
    return found


def _copy(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    return list(value) if isinstance(value, list) else value


def with_given_tensors(group: Hyperparameters, *given: Mapping[str, Any]) -> Hyperparameters:
    """Return a group with the tensors that the user gave, so that changing such a tensor changes the group."""
    return {
        key: next((own[key] for own in given if isinstance(own.get(key), torch.Tensor)), value)
        if isinstance(value, torch.Tensor)
        else value
        for key, value in group.items()
    }


def unshare_tensors(groups: Iterable[dict[str, Any]]) -> None:
    """Give each group its own tensors. Torch lets groups share a default, but we set each group separately."""
    seen: set[int] = set()
    for group in groups:
        for key, value in group.items():
            if isinstance(value, torch.Tensor):
                if id(value) in seen:
                    value = group[key] = value.detach().clone()
                seen.add(id(value))


class ChangedHyperparameters:
    """Tracks which hyperparameters the user has changed in the local copy of the groups.

    Only these are sent: an optimizer may change others itself on its worker.
    """

    def __init__(self, groups: Sequence[Mapping[str, Any]]) -> None:
        self._initial = [hyperparameters_of(group) for group in groups]
        self._keys: list[set[str]] = [set() for _ in groups]

    def values(self, groups: Sequence[Mapping[str, Any]]) -> dict[int, Hyperparameters]:
        """Return, by group, the current values of all hyperparameters that were ever changed."""
        found = {}
        for number, (group, initial, keys) in enumerate(zip(groups, self._initial, self._keys, strict=True)):
            now = hyperparameters_of(group)
            for key, value in now.items():
                before = initial.get(key, _ABSENT)
                if value is not before and not equal(value, before):
                    keys.add(key)
            if keys:
                found[number] = {key: now[key] for key in keys if key in now}
        return found


def equal(one: Any, other: Any) -> bool:
    """Return whether two hyperparameters, or dicts of them, are equal. Tensors are compared by value."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(equal(value, other[key]) for key, value in one.items())
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return (
            isinstance(one, torch.Tensor)
            and isinstance(other, torch.Tensor)
            and one.dtype == other.dtype
            and torch.equal(one, other)
        )
    return type(one) is type(other) and bool(one == other)


def set_hyperparameters(group: dict[str, Any], values: Hyperparameters) -> None:
    """Set hyperparameters of a group. A tensor is changed in place, since others may hold it."""
    for key, value in values.items():
        present = group.get(key)
        if isinstance(present, torch.Tensor) and isinstance(value, int | float) and not isinstance(value, bool):
            with torch.no_grad():
                present.fill_(value)
        elif isinstance(present, torch.Tensor) and isinstance(value, torch.Tensor) and _fits(present, value):
            with torch.no_grad():
                present.copy_(value)
        else:
            group[key] = value


def on_devices_of(group: Mapping[str, Any], values: Hyperparameters) -> Hyperparameters:
    """Return hyperparameters with each tensor on the device where the group has it."""
    return {
        key: value.to(present.device)
        if isinstance(value, torch.Tensor) and isinstance(present := group.get(key), torch.Tensor)
        else value
        for key, value in values.items()
    }


def _fits(present: torch.Tensor, value: torch.Tensor) -> bool:
    return present.shape == value.shape and present.dtype == value.dtype
