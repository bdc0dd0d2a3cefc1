"""RemoteModule under the drop-in: telegrad's, with the restrictions and the pickling of torch's."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import MappingProxyType
from typing import Any, Self

import torch

from telegrad import nn
from telegrad.backward.graph_breaks import keep_uncompiled
from telegrad.drop_in.nn.scripting import ADDED, make_scriptable
from telegrad.rref.handle import RRef

_REMOTE_MODULE_PICKLED_ATTRIBUTES = (
    "on",
    "device",
    "is_device_map_set",
    "is_scriptable",
    "generated_methods",
    "module_rref",
)
"""The attributes of a RemoteModule that are sent in a call."""

_METHODS = ("forward_async", "forward")

_REFUSED = (
    *("register_buffer", "register_parameter", "add_module", "apply", "cuda", "ipu", "xpu", "cpu", "type", "float"),
    *("double", "half", "bfloat16", "to", "register_backward_hook", "register_forward_pre_hook"),
    *("register_forward_hook", "state_dict", "load_state_dict", "named_parameters", "buffers", "named_buffers"),
    *("children", "named_children", "modules", "named_modules", "requires_grad_", "zero_grad", "share_memory"),
    "extra_repr",
)
"""Methods that torch's RemoteModule does not support. `telegrad.nn.RemoteModule` supports nearly all of them."""

_NO_HOOKS: Any = MappingProxyType({})


class _RemoteModule(nn.RemoteModule):
    """A module that is created on another worker and stays there."""

    _label = "module"
    # A received module has none of these in its `__dict__`. As class attributes they make it callable.
    _backward_hooks = _backward_pre_hooks = _forward_hooks = _forward_pre_hooks = _NO_HOOKS

    def __init__(
        self,
        remote_device: str,
        module_cls: Callable[..., torch.nn.Module],
        args: tuple[Any, ...] | None = None,
        kwargs: dict[str, Any] | None = None,
        _module_interface_cls: Any = None,
    ) -> None:
        super().__init__(remote_device, module_cls, args, kwargs, _module_interface_cls)
        self._take_interface(_module_interface_cls)

    def _take_interface(self, interface: Any) -> None:
        """Make this a module that torch.jit.script can compile, if there is an interface."""
        if interface is not None:
            held = self._from_rref(self.module_rref, self.on, self.device, self._label)
            methods = make_scriptable(self, interface, held)
            self.__dict__.update(is_scriptable=True, generated_methods=methods)

    def _bind(self, on: str | int, device: str, rref: RRef[Any], label: str) -> None:
        super()._bind(on, device, rref, label)
        mine = self.__dict__
        mine.update(training=True, _parameters={}, _buffers={}, _modules={})  # as in torch: local and empty
        mine.update(is_device_map_set=_has_device_map(rref), generated_methods=_METHODS)

    # As in torch, attributes that are assigned stay on this worker.
    __setattr__ = torch.nn.Module.__setattr__
    __delattr__ = torch.nn.Module.__delattr__

    def train(self, mode: bool = True) -> Self:
        """Set the mode of the module."""
        super().train(mode)
        self.__dict__["training"] = mode
        return self

    @staticmethod
    def init_from_module_rref(
        remote_device: str, module_rref: RRef[torch.nn.Module], _module_interface_cls: Any = None
    ) -> nn.RemoteModule:
        """Return another RemoteModule for an existing module."""
        place = nn.RemoteModule.init_from_module_rref(remote_device, module_rref, _module_interface_cls)
        made = RemoteModule._from_rref(module_rref, place.on, place.device, "module")
        made._take_interface(_module_interface_cls)
        return made

    def parameters(self, recurse: bool = True) -> Any:
        """Raise an error, as torch does."""
        raise ValueError(
            "Method ``parameters`` not supported for RemoteModule. Please use ``remote_parameters`` instead."
        )

    def __repr__(self) -> str:
        return f"RemoteModule({self._description()})"

    def _local_state(self) -> dict[str, Any]:
        left_out = {*ADDED, "generated_methods"}  # a copy is not scriptable
        return {name: value for name, value in super()._local_state().items() if name not in left_out}

    def __reduce_in_call__(self) -> tuple[Any, ...]:
        return _received, (type(self), self.module_rref, self.on, self.device, self._label)


class RemoteModule(_RemoteModule):
    """A module that is created on another worker and stays there. Its methods run there."""


def _has_device_map(rref: RRef[Any]) -> bool:
    """Whether this worker has a device map for the owner."""
    maps = rref._manager.agent.local.device_maps
    return bool(maps) and bool(maps.get(rref.owner_name()))


def _received(cls: type[_RemoteModule], rref: RRef[Any], on: str | int, device: str, label: str) -> _RemoteModule:
    """Return a module received in a call. As in torch, it has only these attributes."""
    made = cls.__new__(cls)
    values = (on, device, _has_device_map(rref), False, _METHODS, rref)
    made.__dict__.update(zip(_REMOTE_MODULE_PICKLED_ATTRIBUTES, values, strict=True))
    for method in _METHODS:
        made.__dict__[method] = partial(_through, cls, rref, on, device, label, method)
    return made


def _through(
    cls: type[_RemoteModule],
    rref: RRef[Any],
    on: str | int,
    device: str,
    label: str,
    method: str,
    *args: Any,
    **kwargs: Any,
) -> Any:
    return getattr(cls._from_rref(rref, on, device, label), method)(*args, **kwargs)


def _refuse(name: str) -> Callable[..., Any]:
    def refused(self: object, *args: Any, **kwargs: Any) -> Any:
        raise ValueError(f"Method ``{name}`` not supported for RemoteModule")

    refused.__name__ = name
    return refused


for _name in _REFUSED:
    setattr(_RemoteModule, _name, _refuse(_name))


keep_uncompiled(__name__)
