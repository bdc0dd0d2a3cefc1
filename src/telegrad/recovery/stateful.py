"""What a snapshot contains: finds the objects that have state, and saves and loads them.

| object | its state |
| --- | --- |
| module | parameters with ``.grad``, buffers, extra state; parts on other workers are saved there |
| optimizer, scheduler, anything with `state_dict` and `load_state_dict` | what `state_dict` returns |
| tensor | its values and ``.grad`` |
| generator | its state |
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from telegrad.errors import TelegradError
from telegrad.nn.module_handle import ModuleHandle
from telegrad.optim.distributed import DistributedOptimizer
from telegrad.optim.local_optimizer import LocalOptimizer
from telegrad.rref.handle import RRef

_PLAIN = (int, float, complex, str, bytes, bool, type(None), torch.dtype, torch.device, torch.Size, type)


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
    elif isinstance(value, Mapping):
        for name, each in value.items():
            yield from _walk(each, f"{key}[{name!r}]")
    elif isinstance(value, list | tuple):
        for number, each in enumerate(value):
            yield from _walk(each, f"{key}[{number}]")
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from _walk(getattr(value, field.name), f"{key}.{field.name}")
    elif isinstance(value, SimpleNamespace):
        for name, each in vars(value).items():
            yield from _walk(each, f"{key}.{name}")
    elif not isinstance(value, _PLAIN) and not callable(value):
        raise TypeError(
            f"{key} is a {type(value).__name__}, of which no snapshot can be taken: give it the methods state_dict() "
            "and load_state_dict(), or leave it out of what the build function returns"
        )


def _has_state_dict(value: Any) -> bool:
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


# -- saving and loading -------------------------------------------------------------------------------------------


def save(value: Any) -> Any:
    """Return a copy of the state of an object, with its tensors on the CPU."""
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
    if isinstance(value, torch.Tensor):
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


def _save_tensor(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    grad = tensor.grad if tensor.is_leaf else None
    return _on_cpu(tensor), None if grad is None else _on_cpu(grad)


def _on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True)


def _load_tensor(tensor: torch.Tensor, saved: tuple[torch.Tensor, torch.Tensor | None]) -> None:
    values, grad = saved
    if tensor.shape != values.shape:
        raise TelegradError(f"a tensor of shape {list(values.shape)} was saved, and one of {list(tensor.shape)} built")
    with torch.no_grad():
        tensor.detach().copy_(values)
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


def _save_module(module: torch.nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    return (
        {name: _save_tensor(tensor) for name, tensor in _tensors(module)},
        {name: _copied(each.get_extra_state()) for name, each in _extra(module)},
    )


def _load_module(module: torch.nn.Module, saved: tuple[dict[str, Any], dict[str, Any]]) -> None:
    values, extra = saved
    tensors = dict(_tensors(module))
    if tensors.keys() != values.keys():
        differing = sorted(tensors.keys() ^ values.keys())
        raise TelegradError(
            f"a {type(module).__name__} was built with other parameters or buffers than the one that was saved: "
            f"{', '.join(differing[:5])}"
        )
    for name, tensor in tensors.items():
        _load_tensor(tensor, values[name])
    for name, each in _extra(module):
        each.set_extra_state(_copied(extra[name]))


def _copied(state: Any) -> Any:
    """Return a copy of plain data, with tensors on the CPU."""
    if isinstance(state, torch.Tensor):
        return _on_cpu(state)
    if type(state) is dict:
        return {key: _copied(each) for key, each in state.items()}
    if type(state) in (list, tuple):
        return type(state)(_copied(each) for each in state)
    return copy.deepcopy(state)
