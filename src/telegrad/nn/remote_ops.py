"""What RemoteModule has run on the worker that has the module. The first argument is the module itself."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import torch

from telegrad.autograd import get_gradients
from telegrad.default_agent import default_agent
from telegrad.nn.placement import check_device, moved
from telegrad.rpc.api import get_worker_info
from telegrad.rref.handle import RRef

State = tuple[dict[str, Any], dict[str, dict[str, Any]]]
"""The state of a module, and torch's notes on it (versions), by the names of the submodules."""


def build(
    module_cls: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], device: str, scripted: bool
) -> torch.nn.Module:
    """Make the module. (It has no module to begin with: this is the function of the call that makes the reference.)"""
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


def settle(module: torch.nn.Module, gradients: Mapping[str, torch.Tensor], device: str) -> torch.nn.Module:
    """Take in a module that came whole, with what its parameters have in ``.grad``."""
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
    """Call a method on the module's device, in the caller's grad mode; the result comes on the CPU, or is `Itself`."""
    on_cpu = device == "cpu"
    if not on_cpu:
        args, kwargs = moved(args, device), moved(kwargs, device)
    with contextlib.nullcontext() if grad else torch.no_grad():
        result = getattr(module, name)(*args, **kwargs)
    if result is module:
        return Itself
    return result if on_cpu else moved(result, "cpu")


class Itself:
    """Stands for the module, where a method returned it."""


def look(module: torch.nn.Module, name: str) -> tuple[str, Any]:
    """What an attribute of the module is, and what there is to send of it."""
    value = getattr(module, name)
    if isinstance(value, torch.nn.Module):
        return "module", _handle(value)
    if callable(value) and not isinstance(value, torch.Tensor):
        return "method", None
    return "value", moved(value, "cpu")


def assign(module: torch.nn.Module, name: str, value: Any) -> None:
    """Set an attribute of the module."""
    setattr(module, name, value)


def delete(module: torch.nn.Module, name: str) -> None:
    """Delete an attribute of the module."""
    delattr(module, name)


Handle = tuple[RRef[torch.nn.Module], str]
"""What a RemoteModule is made of: a reference to a module, and the name of its class."""


def _handle(module: torch.nn.Module) -> Handle:
    return RRef(module), type(module).__name__


def children(module: torch.nn.Module) -> list[tuple[str, Handle]]:
    """The direct submodules, by name."""
    return [(name, _handle(child)) for name, child in module.named_children()]


def submodules(module: torch.nn.Module, duplicates: bool) -> list[tuple[str, Handle]]:
    """All submodules, by name; not the module itself."""
    return [(name, _handle(part)) for name, part in module.named_modules(remove_duplicate=not duplicates) if name]


def submodule(module: torch.nn.Module, target: str) -> Handle:
    """The submodule of that name."""
    return _handle(module.get_submodule(target))


def parameter(module: torch.nn.Module, target: str) -> RRef[Any]:
    """A reference to the parameter of that name."""
    return RRef(module.get_parameter(target))


def buffer(module: torch.nn.Module, target: str) -> RRef[Any]:
    """A reference to the buffer of that name."""
    return RRef(module.get_buffer(target))


def parameters(module: torch.nn.Module, recurse: bool, duplicates: bool) -> list[tuple[str, RRef[Any]]]:
    """References to the parameters, by name."""
    named = module.named_parameters(recurse=recurse, remove_duplicate=not duplicates)
    return [(name, RRef(parameter)) for name, parameter in named]


def buffers(module: torch.nn.Module, recurse: bool, duplicates: bool) -> list[tuple[str, RRef[Any]]]:
    """The same, of the buffers."""
    named = module.named_buffers(recurse=recurse, remove_duplicate=not duplicates)
    return [(name, RRef(buffer)) for name, buffer in named]


def gradients_of(module: torch.nn.Module, context_id: int) -> dict[str, torch.Tensor]:
    """What passes in a context have left for the parameters of the module, by name."""
    if default_agent().autograd.contexts.get(context_id) is None:
        return {}  # it never came here
    left = get_gradients(context_id)
    return {name: left[p].detach().cpu() for name, p in module.named_parameters() if p in left}


def arrive(module: torch.nn.Module) -> None:
    """Do nothing: that this can be called says that the module is there."""


def train(module: torch.nn.Module, mode: bool) -> None:
    """Set the mode. (The module's own `train` returns the module, which would then be sent.)"""
    module.train(mode)


def to(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], device: str) -> None:
    """Move or cast the module; `device` is what its device will be."""
    check_device(device)
    module.to(*args, **kwargs)


def to_empty(module: torch.nn.Module, device: str, recurse: bool) -> None:
    """Move the module without its values."""
    module.to_empty(device=check_device(device), recurse=recurse)


def compiled(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Compile the module's forward."""
    module.compile(*args, **kwargs)


def cast(module: torch.nn.Module, dtypes: Mapping[torch.dtype, torch.dtype]) -> None:
    """Turn parameters and buffers of certain dtypes into others."""
    casting: Callable[..., Any] = module._apply  # torch gives it no types
    casting(lambda tensor: tensor.to(dtypes.get(tensor.dtype, tensor.dtype)))


def requires_grad(module: torch.nn.Module, flag: bool) -> None:
    """Switch gradients of the parameters on or off."""
    module.requires_grad_(flag)


def zero_grad(module: torch.nn.Module, set_to_none: bool) -> None:
    """Forget what is in ``.grad``."""
    module.zero_grad(set_to_none)


def apply(module: torch.nn.Module, function: Callable[[torch.nn.Module], None]) -> None:
    """Run a function on the module and on all in it."""
    module.apply(function)


def state(module: torch.nn.Module) -> State:
    """What there is to save."""
    saved = module.state_dict()
    return {name: moved(value, "cpu") for name, value in saved.items()}, dict(getattr(saved, "_metadata", {}))


def get_extra_state(module: torch.nn.Module) -> Any:
    """What the module adds to its state."""
    return module.get_extra_state()


def set_extra_state(module: torch.nn.Module, state: Any) -> None:
    """Give it back."""
    module.set_extra_state(state)


def load(
    module: torch.nn.Module, saved: dict[str, Any], notes: dict[str, Any], assign: bool
) -> tuple[list[str], list[str], list[str]]:
    """Take over what was saved. Returns which keys are missing, which were not expected, and what went wrong."""
    state: Any = OrderedDict(saved)
    # Notes on submodules do not reach a RemoteModule inside another module: what is loaded counts as of this version.
    state._metadata = OrderedDict((name, {"version": part._version}) for name, part in module.named_modules())
    state._metadata[""].update(notes)
    try:
        missing, unexpected = module.load_state_dict(state, strict=False, assign=assign)
    except RuntimeError as error:
        return [], [], [f"on worker {get_worker_info().name!r}: {error}"]
    return list(missing), list(unexpected), []


def _name(module_cls: object) -> str:
    return getattr(module_cls, "__qualname__", None) or repr(module_cls)
