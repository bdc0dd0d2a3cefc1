"""What a snapshot contains: finds the objects that have state, and saves and loads them.

| object | its state |
| --- | --- |
| module | parameters with ``.grad``, buffers, extra state, train or eval mode; other workers save the parts they have |
| optimizer, scheduler, anything with `state_dict` and `load_state_dict` | what `state_dict` returns |
| tensor | its values, ``.grad`` and ``requires_grad`` |
| generator | its state |
| number, string, or list, tuple, dict or set of them | its value, which is set in the container or object that has it |
"""

from __future__ import annotations

import copy
import enum
import numbers
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import PurePath
from types import BuiltinFunctionType, FunctionType, MethodType, SimpleNamespace
from typing import Any, NamedTuple

import torch

from telegrad.nn.module_handle import ModuleHandle
from telegrad.optim.checkpoint import restore_types
from telegrad.optim.distributed import DistributedOptimizer
from telegrad.optim.local_optimizer import LocalOptimizer
from telegrad.recovery import module_state, tensor_state
from telegrad.recovery.containers import Container, can_change, entries, is_data, is_dataclass, is_value
from telegrad.rref.handle import RRef

_CONSTANT = (
    *(int, float, complex, str, bytes, type(None), numbers.Number),
    *(torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format, type, enum.Enum, PurePath, range),
    *(FunctionType, BuiltinFunctionType, MethodType, partial),
)
"""Types of values without state: they change only if another value takes their place."""


class Found(NamedTuple):
    """The objects with state of a training run, by a key that is the same whenever they are built again."""

    local: dict[str, Any]
    remote: dict[str, dict[str, RRef[Any]]]
    """By worker."""

    def add(self, key: str, reference: RRef[Any]) -> None:
        """Add the object that a reference refers to."""
        if reference.is_owner():
            self.local[key] = reference.local_value()
        else:
            self.remote.setdefault(reference.owner_name(), {})[key] = reference

    def optimizers(self) -> list[DistributedOptimizer]:
        """Return the distributed optimizers."""
        return [each for each in self.local.values() if isinstance(each, DistributedOptimizer)]


def find(state: Any) -> Found:
    """Find all objects with state in what a user's function has built. Raises TypeError for what cannot be saved."""
    found = Found({}, {})
    for key, value in _walk(state, "state"):
        if isinstance(value, RRef):
            found.add(key, value)
            continue
        found.local[key] = value
        if isinstance(value, DistributedOptimizer):
            for part in value.parts():
                found.add(f"{key}/{part.owner_name()}", part)
    return found


def _walk(value: Any, key: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, ModuleHandle):
        yield key, value.module_rref
    elif isinstance(value, torch.nn.Module):
        yield key, value
        for name, part in value.named_modules():
            if isinstance(part, ModuleHandle):
                yield f"{key}.{name}", part.module_rref
    elif isinstance(value, RRef | torch.Tensor | torch.Generator) or _has_state_dict(value):
        yield key, value
    elif type(value) is set and is_data(value):
        yield key, Container([value], key, _CONSTANT)
    elif isinstance(value, Mapping | list | tuple | SimpleNamespace) or is_dataclass(value):
        if can_change(value):
            yield key, Container(value, key, _CONSTANT)
        for _, label, each in entries(value):
            if not (can_change(value) and is_value(each)):
                yield from _walk(each, f"{key}{label}")
    elif not isinstance(value, _CONSTANT):
        raise TypeError(
            f"{key} is a {type(value).__name__}, of which no snapshot can be taken: give it the methods state_dict() "
            "and load_state_dict(), or leave it out of what the build function returns"
        )


def _has_state_dict(value: Any) -> bool:
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


# -- saving and loading -------------------------------------------------------------------------------------------


def save(value: Any) -> Any:
    """Return a copy of the state of an object, with its tensors on the CPU."""
    if isinstance(value, Container):
        return value.save()
    if isinstance(value, torch.Tensor):
        return tensor_state.save(value)
    if isinstance(value, torch.Generator):
        return value.get_state()
    if isinstance(value, LocalOptimizer):
        return value.state(None)
    if isinstance(value, DistributedOptimizer):
        return value.hyperparameters()
    if isinstance(value, torch.nn.Module):
        return module_state.save(value, _copied)
    if not _has_state_dict(value):
        raise TypeError(
            f"no snapshot can be taken of a {type(value).__name__}: give it the methods state_dict() and "
            "load_state_dict()"
        )
    return _copied(value.state_dict())


def load(value: Any, saved: Any) -> None:
    """Give an object the state that `save` returned for another one like it."""
    if isinstance(value, Container):
        value.load(saved)
    elif isinstance(value, torch.Tensor):
        tensor_state.load(value, saved)
    elif isinstance(value, torch.Generator):
        value.set_state(saved)
    elif isinstance(value, LocalOptimizer):
        value.load(saved, 0, exact=True)
    elif isinstance(value, DistributedOptimizer):
        value.load_hyperparameters(saved)
    elif isinstance(value, torch.nn.Module):
        module_state.load(value, saved, _copied)
    else:
        value.load_state_dict(_copied(saved))
        if isinstance(value, torch.optim.Optimizer):
            restore_types(value, saved.get("state", {}))


def _copied(state: Any) -> Any:
    """Return a copy of plain data, with tensors on the CPU."""
    if isinstance(state, torch.Tensor):
        return tensor_state.on_cpu(state)
    if type(state) in (dict, OrderedDict):
        copied = type(state)((key, _copied(each)) for key, each in state.items())
        if isinstance(copied, OrderedDict):  # that of a module has the versions of its classes in an attribute
            vars(copied).update(vars(state))
        return copied
    if type(state) in (list, tuple):
        return type(state)(_copied(each) for each in state)
    return copy.deepcopy(state)
