"""The state of a module: parameters, buffers, extra state, and train or eval mode.

Parameters are changed in place, because optimizers refer to them. A step may give a buffer another shape, or make one
out of None: then another tensor takes its place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from telegrad.errors import TelegradError
from telegrad.nn.module_handle import ModuleHandle
from telegrad.recovery import tensor_state
from telegrad.recovery.tensor_state import SavedTensor

SavedModule = tuple[dict[str, SavedTensor], dict[str, SavedTensor | None], dict[str, Any], dict[str, bool]]
"""The parameters, the buffers, the extra state of modules, and which are in training mode."""


def save(module: torch.nn.Module, copied: Callable[[Any], Any]) -> SavedModule:
    """Return a copy of the state of a module. `copied` copies the extra state."""
    return (
        {name: _save_tensor(name, tensor) for name, tensor in _parameters(module)},
        {
            f"{prefix}.{name}": None if tensor is None else _save_tensor(f"{prefix}.{name}", tensor)
            for prefix, each in _own(module)
            for name, tensor in _buffers(each).items()
        },
        {name: copied(each.get_extra_state()) for name, each in _extra(module)},
        {name: each.training for name, each in _own(module)},
    )


def load(module: torch.nn.Module, saved: SavedModule, copied: Callable[[Any], Any]) -> None:
    """Give a module the state that another one had."""
    parameters, buffers, extra, training = saved
    own = dict(_parameters(module))
    names = [f"{prefix}.{name}" for prefix, each in _own(module) for name in _buffers(each)]
    differing = sorted((own.keys() ^ parameters.keys()) | (set(names) ^ buffers.keys()))
    if differing:
        raise TelegradError(
            f"a {type(module).__name__} was built with other parameters or buffers than the one that was saved: "
            f"{', '.join(name.removeprefix('.') for name in differing[:5])}"
        )
    for name, tensor in own.items():
        try:
            tensor_state.load(tensor, parameters[name])
        except TelegradError as error:
            raise TelegradError(f"{name.removeprefix('.')}: {error}") from error
    for prefix, each in _own(module):
        for name, buffer in _buffers(each).items():
            _load_buffer(each, name, buffer, buffers[f"{prefix}.{name}"])
    for name, each in _extra(module):
        each.set_extra_state(copied(extra[name]))
    for name, each in _own(module):
        each.training = training.get(name, each.training)


def _load_buffer(module: torch.nn.Module, name: str, buffer: torch.Tensor | None, saved: SavedTensor | None) -> None:
    if saved is not None and buffer is not None and tensor_state.fits(buffer, saved):
        tensor_state.load(buffer, saved)
    elif saved is not None or buffer is not None:
        setattr(module, name, None if saved is None else tensor_state.new(saved))


def _save_tensor(name: str, tensor: torch.Tensor) -> SavedTensor:
    try:
        return tensor_state.save(tensor)
    except TypeError as error:
        raise TypeError(f"{name.removeprefix('.')}: {error}") from error


def _own(module: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield the submodules of a module that are on this worker."""
    for name, each in module.named_modules():
        if not isinstance(each, ModuleHandle):
            yield name, each


def _parameters(module: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    for prefix, each in _own(module):
        for name, parameter in each.named_parameters(recurse=False):
            yield f"{prefix}.{name}", parameter


def _buffers(module: torch.nn.Module) -> dict[str, torch.Tensor | None]:
    """Return the buffers of a module without those of its submodules, those that are None included."""
    return dict(module._buffers.items())  # that of a scripted module has no other methods of a dict


def _extra(module: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    for name, each in _own(module):
        if type(each).get_extra_state is not torch.nn.Module.get_extra_state:
            yield name, each
