"""Functions that a RemoteModule runs on its worker. The first argument is the module."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import torch

from telegrad.autograd import get_gradients
from telegrad.default_agent import default_agent
from telegrad.errors import ProtocolError
from telegrad.nn.nested_tensors import move_tensors
from telegrad.nn.placement import check_device
from telegrad.rpc.api import current_call, get_worker_info
from telegrad.rpc.exposing import default_registry
from telegrad.rref.handle import RRef

ModuleState = tuple[dict[str, Any], dict[str, dict[str, Any]]]
"""A module's state dict, and torch's metadata for it (versions) by submodule name."""


def build(
    module_cls: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], device: str, scripted: bool
) -> torch.nn.Module:
    """Build the module. (This one takes no module: its result is the value of the reference.)"""
    registry = default_agent().registry
    if registry is not None:
        if scripted or type(device) is not str:
            raise ProtocolError("a peer asked for a module that cannot be built in registered mode")
        module_cls = registry.exposed_class(module_cls, torch.nn.Module, _caller())
    target = check_device(device)
    try:
        module = module_cls(*args, **kwargs)
    except Exception as error:
        error.add_note(f"raised by {_name(module_cls)} for a RemoteModule on worker {get_worker_info().name!r}")
        raise
    if not isinstance(module, torch.nn.Module):
        raise ValueError(
            "Expect `module_cls(*args, **kwargs)` returns an instance of <class nn.Module>, but it returns an instance "
            f"of {type(module)}: {_name(module_cls)}, on worker {get_worker_info().name!r}"
        )
    placed: torch.nn.Module = module.to(target)
    if scripted and not isinstance(placed, torch.jit.ScriptModule):
        placed = torch.jit.script(placed)
    return placed


def install(module: torch.nn.Module, gradients: Mapping[str, torch.Tensor], device: str) -> torch.nn.Module:
    """Place a module that was sent as a whole, with the ``.grad`` of its parameters."""
    for name, parameter in module.named_parameters():
        if name in gradients:
            parameter.grad = gradients[name]
    return module.to(check_device(device))


def call(
    module: torch.nn.Module,
    name: str,
    device: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    grad: bool = True,
) -> Any:
    """Call a method on the module's device in the caller's grad mode. Return the result, or `ReturnedSelf`.

    Tensors in the result go back by the caller's device map, and are moved to the CPU if the map does not name their
    device.
    """
    mapped = _mapped_devices()
    on_cpu = device == "cpu" and not mapped
    if not on_cpu:
        args, kwargs = move_tensors(args, device), move_tensors(kwargs, device)
    registry = default_agent().registry
    method = getattr(module, name) if registry is None else registry.method(module, name, _caller())
    with contextlib.nullcontext() if grad else torch.no_grad():
        result = method(*args, **kwargs)
    if result is module:
        return ReturnedSelf
    return result if on_cpu else move_tensors(result, "cpu", mapped)


class ReturnedSelf:
    """Returned in place of the module by methods that return the module itself."""


def get_attribute(module: torch.nn.Module, name: str) -> tuple[str, Any]:
    """Return the kind of an attribute of the module ("module", "method" or "value"), and its value to send."""
    value = getattr(module, name)
    if isinstance(value, torch.nn.Module):
        return "module", _submodule_ref(value)
    if callable(value) and not isinstance(value, torch.Tensor):
        return "method", None
    return "value", move_tensors(value, "cpu", _mapped_devices())


def set_attribute(module: torch.nn.Module, name: str, value: Any) -> None:
    """Set an attribute of the module."""
    setattr(module, name, value)


def delete_attribute(module: torch.nn.Module, name: str) -> None:
    """Delete an attribute of the module."""
    delattr(module, name)


SubmoduleRef = tuple[RRef[torch.nn.Module], str]
"""A reference to a module, and the name of its class."""


def _submodule_ref(module: torch.nn.Module) -> SubmoduleRef:
    return RRef(module), type(module).__name__


def children(module: torch.nn.Module) -> list[tuple[str, SubmoduleRef]]:
    """Return the direct submodules by name."""
    return [(name, _submodule_ref(child)) for name, child in module.named_children()]


def submodules(module: torch.nn.Module, duplicates: bool) -> list[tuple[str, SubmoduleRef]]:
    """Return all submodules by name, without the module itself."""
    return [
        (name, _submodule_ref(part)) for name, part in module.named_modules(remove_duplicate=not duplicates) if name
    ]


def submodule(module: torch.nn.Module, target: str) -> SubmoduleRef:
    """Return the submodule of that name."""
    return _submodule_ref(module.get_submodule(target))


def parameter(module: torch.nn.Module, target: str) -> RRef[Any]:
    """Return a reference to the parameter of that name."""
    return RRef(module.get_parameter(target))


def buffer(module: torch.nn.Module, target: str) -> RRef[Any]:
    """Return a reference to the buffer of that name."""
    return RRef(module.get_buffer(target))


def parameters(module: torch.nn.Module, recurse: bool, duplicates: bool) -> list[tuple[str, RRef[Any]]]:
    """Return references to the parameters by name."""
    named = module.named_parameters(recurse=recurse, remove_duplicate=not duplicates)
    return [(name, RRef(parameter)) for name, parameter in named]


def buffers(module: torch.nn.Module, recurse: bool, duplicates: bool) -> list[tuple[str, RRef[Any]]]:
    """Return references to the buffers by name."""
    named = module.named_buffers(recurse=recurse, remove_duplicate=not duplicates)
    return [(name, RRef(buffer)) for name, buffer in named]


def gradients(module: torch.nn.Module, context_id: int) -> dict[str, torch.Tensor]:
    """Return the gradients that a context has for the parameters of the module, by name."""
    if default_agent().autograd.contexts.get(context_id) is None:
        return {}  # no call in this context reached this worker
    found = get_gradients(context_id)
    return {name: found[p].detach().cpu() for name, p in module.named_parameters() if p in found}


def confirm(module: torch.nn.Module) -> None:
    """Do nothing. A call of this succeeds once the module exists."""


def train(module: torch.nn.Module, mode: bool) -> None:
    """Set the mode. (The module's own `train` returns the module, which would be sent back.)"""
    module.train(mode)


def to(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], device: str) -> None:
    """Move or cast the module. `device` is its new device."""
    check_device(device)
    module.to(*args, **kwargs)


def to_empty(module: torch.nn.Module, device: str, recurse: bool) -> None:
    """Move the module without copying its values."""
    module.to_empty(device=check_device(device), recurse=recurse)


def compile_forward(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Compile the module's forward."""
    module.compile(*args, **kwargs)


def cast(module: torch.nn.Module, dtypes: Mapping[torch.dtype, torch.dtype]) -> None:
    """Cast parameters and buffers of the given dtypes."""
    apply_to_tensors: Callable[..., Any] = module._apply  # untyped in torch
    apply_to_tensors(lambda tensor: tensor.to(dtypes.get(tensor.dtype, tensor.dtype)))


def requires_grad(module: torch.nn.Module, flag: bool) -> None:
    """Switch gradients of the parameters on or off."""
    module.requires_grad_(flag)


def zero_grad(module: torch.nn.Module, set_to_none: bool) -> None:
    """Clear ``.grad`` of the parameters."""
    module.zero_grad(set_to_none)


def apply(module: torch.nn.Module, function: Callable[[torch.nn.Module], None]) -> None:
    """Run a function on the module and all its submodules."""
    module.apply(function)


def get_state(module: torch.nn.Module) -> ModuleState:
    """Return the module's state dict on the CPU."""
    saved = module.state_dict()
    return {name: move_tensors(value, "cpu") for name, value in saved.items()}, dict(getattr(saved, "_metadata", {}))


def get_extra_state(module: torch.nn.Module) -> Any:
    """Return the extra state of the module."""
    return module.get_extra_state()


def set_extra_state(module: torch.nn.Module, state: Any) -> None:
    """Set the extra state of the module."""
    module.set_extra_state(state)


def load_state(
    module: torch.nn.Module, saved: dict[str, Any], metadata: dict[str, Any], assign: bool, device: str
) -> tuple[list[str], list[str], list[str]]:
    """Load a state dict. Return the missing keys, the unexpected keys, and the errors."""
    if assign:  # the tensors become parameters of the module
        saved = move_tensors(saved, device)
    state: Any = OrderedDict(saved)
    # A RemoteModule inside another module gets no metadata for its submodules, so we assume the current version.
    state._metadata = OrderedDict((name, {"version": part._version}) for name, part in module.named_modules())
    state._metadata[""].update(metadata)
    try:
        missing, unexpected = module.load_state_dict(state, strict=False, assign=assign)
    except RuntimeError as error:
        return [], [], [f"on worker {get_worker_info().name!r}: {error}"]
    return list(missing), list(unexpected), []


def _name(module_cls: object) -> str:
    return getattr(module_cls, "__qualname__", None) or repr(module_cls)


def _mapped_devices() -> frozenset[str]:
    """Return the devices of this worker that the caller's device map names: their tensors can be returned."""
    served = current_call()
    return frozenset([ours for _, ours in served.devices]) if served is not None and served.devices else frozenset()


def _caller() -> str:
    """Return the name of the worker for which the current function runs."""
    served = current_call()
    return served.caller if served is not None else get_worker_info().name


# What other workers may run in registered mode, and the method that the module's class must list for it. The rest reads
# or changes more than the listed methods do.
default_registry.add_internal("nn:build", build)
for _operation, _method in (
    (call, ""),  # which checks the method that it calls
    (confirm, ""),
    (parameters, "parameters"),
    (parameter, "parameters"),
    (gradients, "parameters"),
    (buffers, "buffers"),
    (buffer, "buffers"),
    (train, "train"),
    (to, "to"),
    (cast, "to"),
    (requires_grad, "requires_grad_"),
    (zero_grad, "zero_grad"),
    (get_state, "state_dict"),
    (load_state, "load_state_dict"),
):
    default_registry.add_operation(f"nn:{_operation.__name__}", _operation, method=_method)
