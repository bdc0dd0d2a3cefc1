"""What a snapshot contains: finds the objects that have state, and saves and loads them.

| object | its state |
| --- | --- |
| module | parameters with ``.grad``, buffers, extra state, train or eval mode; other workers save the parts they have |
| optimizer, scheduler, anything with `state_dict` and `load_state_dict` | what `state_dict` returns |
| tensor | its values, ``.grad`` and ``requires_grad`` |
| generator | its state |
| number, string, or list, tuple, dict or set of them | its value, which is set in the object or container that has it |
"""

from __future__ import annotations

import copy
import dataclasses
import enum
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import PurePath
from types import BuiltinFunctionType, FunctionType, MethodType, SimpleNamespace
from typing import Any, NamedTuple

import torch

from telegrad.errors import TelegradError
from telegrad.nn.module_handle import ModuleHandle
from telegrad.optim.distributed import DistributedOptimizer
from telegrad.optim.local_optimizer import LocalOptimizer
from telegrad.rref.handle import RRef

_PLAIN = (int, float, complex, str, bytes, bool, type(None))
_CONSTANT = (
    *_PLAIN,
    *(torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format, type, enum.Enum, PurePath, range),
    *(FunctionType, BuiltinFunctionType, MethodType, partial),
)
"""Types of values without state: they change only if another value takes their place."""

_SavedTensor = tuple[torch.Tensor, torch.Tensor | None, bool]
"""The values, ``.grad`` and ``requires_grad``."""


class _Entry:
    """What `holder`, an object or container, has under a name. Steps may replace it."""

    def __init__(self, holder: Any, name: Any) -> None:
        self._holder = holder
        self._name = name

    def _get(self) -> Any:
        holder = self._holder
        return holder[self._name] if isinstance(holder, dict | list) else getattr(holder, self._name)

    def save(self) -> Any:
        """Return a copy of the value."""
        raise NotImplementedError

    def load(self, saved: Any) -> None:
        """Set the value."""
        raise NotImplementedError


class TensorEntry(_Entry):
    """A tensor."""

    def save(self) -> _SavedTensor:
        """Return a copy of the tensor."""
        value = self._get()
        if not isinstance(value, torch.Tensor):
            raise TypeError(
                f"no snapshot can be taken of {self._name!r}, now a {type(value).__name__}, where the build function "
                "has put a tensor"
            )
        return _save_tensor(value)

    def load(self, saved: _SavedTensor) -> None:
        """Change the tensor in place."""
        _load_tensor(self._get(), saved)


class PlainEntry(_Entry):
    """A number, a string or plain data."""

    def save(self) -> Any:
        """Return a copy of the value."""
        value = self._get()
        if not _is_data(value, (*_PLAIN, torch.Tensor)):
            raise TypeError(
                f"no snapshot can be taken of {self._name!r}, now a {type(value).__name__}, where the build function "
                "has put plain data: create the object in the build function"
            )
        return _copied(value)

    def load(self, saved: Any) -> None:
        """Set the value. A list, dict or set remains the same object."""
        value, saved = self._get(), _copied(saved)
        if type(value) is list and type(saved) is list:
            value[:] = saved
        elif type(value) in (dict, set) and type(value) is type(saved):
            value.clear()
            value.update(saved)
        elif isinstance(self._holder, dict | list):
            self._holder[self._name] = saved
        else:
            setattr(self._holder, self._name, saved)


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
    elif type(value) in (list, dict, set) and _is_data(value, _PLAIN):
        yield key, PlainEntry([value], 0)
    elif isinstance(value, Mapping | list | tuple | SimpleNamespace) or _is_dataclass(value):
        can_change = _can_change(value)
        for name, suffix, each in _entries(value):
            if can_change and _is_data(each, _PLAIN):
                yield f"{key}{suffix}", PlainEntry(value, name)
            elif can_change and type(each) is torch.Tensor:
                yield f"{key}{suffix}", TensorEntry(value, name)
            else:
                yield from _walk(each, f"{key}{suffix}")
    elif not isinstance(value, _CONSTANT):
        raise TypeError(
            f"{key} is a {type(value).__name__}, of which no snapshot can be taken: give it the methods state_dict() "
            "and load_state_dict(), or leave it out of what the build function returns"
        )


def _entries(value: Any) -> Iterator[tuple[Any, str, Any]]:
    """Yield the name of each entry of a container or object, how it is written in a key, and the entry."""
    if isinstance(value, Mapping):
        yield from ((name, f"[{name!r}]", each) for name, each in value.items())
    elif isinstance(value, list | tuple):
        yield from ((number, f"[{number}]", each) for number, each in enumerate(value))
    elif isinstance(value, SimpleNamespace):
        yield from ((name, f".{name}", each) for name, each in vars(value).items())
    else:
        names = [field.name for field in dataclasses.fields(value)]
        yield from ((name, f".{name}", getattr(value, name)) for name in names)


def _is_dataclass(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _can_change(value: Any) -> bool:
    """Return whether another value can take the place of an entry."""
    if _is_dataclass(value):
        return not type(value).__dataclass_params__.frozen
    return isinstance(value, dict | list | SimpleNamespace)


def _is_data(value: Any, kinds: tuple[type, ...]) -> bool:
    """Return whether a value is of one of these types, or consists of lists, tuples, sets and dicts of them."""
    if type(value) in (dict, OrderedDict):
        return all(_is_data(each, kinds) for item in value.items() for each in item)
    if type(value) in (list, tuple, set):
        return all(_is_data(each, kinds) for each in value)
    return type(value) in kinds


def _has_state_dict(value: Any) -> bool:
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


# -- saving and loading -------------------------------------------------------------------------------------------


def save(value: Any) -> Any:
    """Return a copy of the state of an object, with its tensors on the CPU."""
    if isinstance(value, _Entry):
        return value.save()
    if isinstance(value, torch.Tensor):
        return _save_tensor(value)
    if isinstance(value, torch.Generator):
        return value.get_state()
    if isinstance(value, LocalOptimizer):
        return value.state(None)
    if isinstance(value, DistributedOptimizer):
        return value.hyperparameters()
    if isinstance(value, torch.nn.Module):
        return _save_module(value)
    if not _has_state_dict(value):
        raise TypeError(
            f"no snapshot can be taken of a {type(value).__name__}: give it the methods state_dict() and "
            "load_state_dict()"
        )
    return _copied(value.state_dict())


def load(value: Any, saved: Any) -> None:
    """Give an object the state that `save` returned for another one like it."""
    if isinstance(value, _Entry):
        value.load(saved)
    elif isinstance(value, torch.Tensor):
        _load_tensor(value, saved)
    elif isinstance(value, torch.Generator):
        value.set_state(saved)
    elif isinstance(value, LocalOptimizer):
        value.load(saved, 0)
    elif isinstance(value, DistributedOptimizer):
        value.load_hyperparameters(saved)
    elif isinstance(value, torch.nn.Module):
        _load_module(value, saved)
    else:
        value.load_state_dict(_copied(saved))


def _save_tensor(tensor: torch.Tensor) -> _SavedTensor:
    grad = tensor.grad if tensor.is_leaf else None
    return _on_cpu(tensor), None if grad is None else _on_cpu(grad), tensor.requires_grad


def _on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True)


def _load_tensor(tensor: torch.Tensor, saved: _SavedTensor) -> None:
    values, grad, requires_grad = saved
    if tensor.shape != values.shape or tensor.dtype != values.dtype:
        raise TelegradError(
            f"a tensor of shape {list(values.shape)} and type {values.dtype} was saved, and one of "
            f"{list(tensor.shape)} and {tensor.dtype} built"
        )
    with torch.no_grad():
        tensor.detach().copy_(values)
    if tensor.requires_grad != requires_grad:
        tensor.requires_grad_(requires_grad)
    tensor.grad = None if grad is None else grad.to(tensor.device, copy=True)


def _own(module: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield the submodules of a module that are on this worker."""
    for name, each in module.named_modules():
        if not isinstance(each, ModuleHandle):
            yield name, each


def _tensors(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for prefix, each in _own(module):
        for name, tensor in [*each.named_parameters(recurse=False), *each.named_buffers(recurse=False)]:
            yield f"{prefix}.{name}", tensor


def _extra(module: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    for name, each in _own(module):
        if type(each).get_extra_state is not torch.nn.Module.get_extra_state:
            yield name, each


_SavedModule = tuple[dict[str, _SavedTensor], dict[str, Any], dict[str, bool]]
"""The tensors, the extra state of modules, and which are in training mode."""


def _save_module(module: torch.nn.Module) -> _SavedModule:
    return (
        {name: _save_tensor(tensor) for name, tensor in _tensors(module)},
        {name: _copied(each.get_extra_state()) for name, each in _extra(module)},
        {name: each.training for name, each in _own(module)},
    )


def _load_module(module: torch.nn.Module, saved: _SavedModule) -> None:
    values, extra, training = saved
    tensors = dict(_tensors(module))
    if tensors.keys() != values.keys():
        differing = sorted(tensors.keys() ^ values.keys())
        raise TelegradError(
            f"a {type(module).__name__} was built with other parameters or buffers than the one that was saved: "
            f"{', '.join(differing[:5])}"
        )
    for name, tensor in tensors.items():
        try:
            _load_tensor(tensor, values[name])
        except TelegradError as error:
            raise TelegradError(f"{name.removeprefix('.')}: {error}") from error
    for name, each in _extra(module):
        each.set_extra_state(_copied(extra[name]))
    for name, each in _own(module):
        each.training = training.get(name, each.training)


def _copied(state: Any) -> Any:
    """Return a copy of plain data, with tensors on the CPU."""
    if isinstance(state, torch.Tensor):
        return _on_cpu(state)
    if type(state) in (dict, OrderedDict):
        copied = type(state)((key, _copied(each)) for key, each in state.items())
        if isinstance(copied, OrderedDict):  # that of a module has the versions of its classes in an attribute
            vars(copied).update(vars(state))
        return copied
    if type(state) in (list, tuple):
        return type(state)(_copied(each) for each in state)
    return copy.deepcopy(state)
