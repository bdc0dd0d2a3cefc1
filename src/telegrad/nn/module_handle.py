"""The local handle of a module on another worker: its identity, attributes and copies."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn, Self

import torch

from telegrad.backward.graph_breaks import keep_uncompiled
from telegrad.errors import PayloadError, TelegradError
from telegrad.nn import remote_ops
from telegrad.nn.context_guard import guard_result, in_context
from telegrad.nn.nested_tensors import move_tensors
from telegrad.nn.unsupported import NoParameters, RemoteOnlyDict, raise_unsupported
from telegrad.rref.handle import Proxy, RRef, call_through

_LOCAL = frozenset(torch.nn.Module().__dict__) - {"training"}
"""Attributes that torch gives every module: these are the handle's own. All others are the remote module's."""

_IDENTITY = frozenset({"on", "device", "module_rref", "is_scriptable", "_label", "_assigned"})
"""Attributes of the handle that say which module it stands for."""


class ModuleHandle(torch.nn.Module):
    """Stands for a module on another worker: reads and assigns its attributes there, and calls its methods there."""

    if TYPE_CHECKING:  # not at run time: TorchScript would read these, and it does not support unions
        on: str | int
        """The worker: its name, or its id if it was given as a rank."""
        device: str
        """The device there."""
        module_rref: RRef[torch.nn.Module]
        is_scriptable: bool
        """Whether torch.jit.script can compile it: only in the drop-in, and only with an interface."""

    _assigned = frozenset[str]()  # private names that were assigned through this handle

    @classmethod
    def _from_rref(cls, rref: RRef[Any], on: str | int, device: str, label: str) -> Self:
        """Return a handle of an existing module. `label` is the name of its class."""
        made = cls.__new__(cls)
        made._bind(on, device, rref, label)
        return made

    def _bind(self, on: str | int, device: str, rref: RRef[Any], label: str) -> None:
        """Initialize this object as the handle of a module."""
        torch.nn.Module.__init__(self)
        mine = self.__dict__
        del mine["training"]  # the remote module's, and read from there
        mine.update(on=on, device=device, module_rref=rref, is_scriptable=False, _label=label)
        mine["_parameters"] = NoParameters(self._display_name())
        for kind in ("_buffers", "_modules"):
            mine[kind] = RemoteOnlyDict(self._display_name())

    def _run(self, function: Callable[..., Any], *args: Any) -> Any:
        """Run a function of `remote_ops` on the module."""
        return call_through(self.module_rref.rpc_sync(), function, *args)

    def _call(self, proxy: Proxy, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a method of the module, in this thread's grad mode."""
        rref = self.module_rref
        maps = rref._manager.agent.local.device_maps
        device_map = dict(maps.get(rref.owner_name(), ())) if maps else {}
        # The map says where tensors of its devices go. Others go through the CPU: the worker may lack their devices.
        args, kwargs = move_tensors(args, "cpu", device_map), move_tensors(kwargs, "cpu", device_map)
        grad = torch.is_grad_enabled()
        # In a context, the request itself carries the grad mode.
        if name == "__call__" and self.device == "cpu" and not device_map and (grad or in_context()):
            return proxy.__call__(*args, **kwargs)  # the module's: a proxy has none
        return call_through(proxy, remote_ops.call, name, self.device, args, kwargs, grad)

    # -- attributes -------------------------------------------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the module: a method as a function that calls it there, a value as a copy."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            # Torch probes modules for private names, and would treat the handle as if it were the remote module. So we
            # look up a private name remotely only if it was assigned through this handle.
            hidden = name.startswith("_") and name not in self._assigned
            if hidden or "module_rref" not in self.__dict__:
                raise
        value: Any = None
        kind = "method"  # in registered mode only methods can be used
        if self.module_rref._manager.agent.registry is None:
            kind, value = self._run(remote_ops.get_attribute, name)
        if kind == "module":
            return self._submodule_handle(value)
        if kind == "value":
            return value if in_context() else guard_result(value, self._display_name())

        def method(*args: Any, **kwargs: Any) -> Any:
            result = self._call(self.module_rref.rpc_sync(), name, args, kwargs)
            if result is remote_ops.ReturnedSelf:
                return self
            return result if in_context() else guard_result(result, self._display_name(), args, kwargs)

        method.__name__ = name
        return method

    def __setattr__(self, name: str, value: Any) -> None:
        """Assign a copy of the value to an attribute of the module. Raises for tensors and modules."""
        if self._is_local(name):
            super().__setattr__(name, value)
            return
        if isinstance(value, torch.Tensor | torch.nn.Module) and not isinstance(value, ModuleHandle):
            raise TelegradError(
                f"cannot assign a {type(value).__name__} to {name!r} of {self._display_name()}: the worker would get a "
                "copy that shares neither changes nor gradients with yours. Use load_state_dict() to set its values, "
                "or apply() to run a function there that assigns it. (torch.func.functional_call assigns, too: call "
                "it on the worker)"
            )
        self._run(remote_ops.set_attribute, name, value)
        if name.startswith("_"):
            self.__dict__["_assigned"] = self._assigned | {name}

    def __delattr__(self, name: str) -> None:
        """Delete an attribute of the module."""
        if self._is_local(name):
            super().__delattr__(name)
        else:
            self._run(remote_ops.delete_attribute, name)
            if name in self._assigned:
                self.__dict__["_assigned"] = self._assigned - {name}

    def _is_local(self, name: str) -> bool:
        """Return whether an attribute is the handle's and not the module's. Raises if it must not be changed."""
        if "module_rref" not in self.__dict__ or name in _LOCAL or name.startswith("__"):
            return True
        if name in _IDENTITY:
            raise TelegradError(
                f"{name!r} of {self._display_name()} cannot be changed; use to() to move it to another device"
            )
        if not hasattr(type(self), name):
            return False
        if inspect.isroutine(inspect.getattr_static(type(self), name)):
            raise TelegradError(
                f"{name}() of {self._display_name()} cannot be replaced: the module on the worker would not see it. "
                "Use apply() to run a function there that replaces it, or a forward hook"
            )
        return True  # declared by a subclass

    def _submodule_handle(self, submodule: remote_ops.SubmoduleRef) -> Self:
        rref, label = submodule
        return self._from_rref(rref, self.on, self.device, label)

    # -- sending, copying, printing -----------------------------------------------------------------------------------

    def __reduce_in_call__(self) -> tuple[Any, ...]:
        """Pickle as a handle of the same module when sent in a call: see `telegrad.wire.payload`."""
        return _unpickle, (type(self), self.module_rref, self.on, self.device, self._label)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise PayloadError(
            "Cannot pickle RemoteModule in python pickler. RemoteModule can only be pickled when using RPC. To save a "
            "model, save its state_dict()"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Copy the module on its worker, and the hooks of this handle."""
        made = self._copy_remotely(copy.deepcopy)
        memo[id(self)] = made
        made.__dict__.update({name: copy.deepcopy(value, memo) for name, value in self._local_state().items()})
        return made

    def __copy__(self) -> Self:
        """Copy the module on its worker as ``copy.copy`` does: the copy shares the parameters."""
        made = self._copy_remotely(copy.copy)
        made.__dict__.update(self._local_state())
        return made

    def _copy_remotely(self, function: Callable[[Any], Any]) -> Self:
        return self._from_rref(call_through(self.module_rref.remote(), function), self.on, self.device, self._label)

    def _local_state(self) -> dict[str, Any]:
        """Return what the handle has besides its identity, such as hooks."""
        identity = _IDENTITY - {"_assigned"}
        return {
            name: value
            for name, value in self.__dict__.items()
            if name not in identity and not isinstance(value, RemoteOnlyDict)
        }

    def extra_repr(self) -> str:
        """Return the text between the brackets of ``repr()``."""
        return self._description()

    def _description(self) -> str:
        return f"{self._label} on {self.on!r}, device={self.device!r}"

    def _display_name(self) -> str:
        return f"RemoteModule({self._description()})"

    # -- methods that would change only the handle --------------------------------------------------------------------

    def register_buffer(self, name: str, tensor: torch.Tensor | None, persistent: bool = True) -> NoReturn:
        """Not supported."""
        raise_unsupported("register_buffer")

    def register_parameter(self, name: str, param: torch.nn.Parameter | None) -> NoReturn:
        """Not supported."""
        raise_unsupported("register_parameter")

    def add_module(self, name: str, module: torch.nn.Module | None) -> NoReturn:
        """Not supported."""
        raise_unsupported("add_module")

    def register_module(self, name: str, module: torch.nn.Module | None) -> NoReturn:
        """Not supported."""
        raise_unsupported("register_module")

    def set_submodule(self, target: str, module: torch.nn.Module, strict: bool = False) -> NoReturn:
        """Not supported."""
        raise_unsupported("set_submodule")

    def share_memory(self) -> NoReturn:
        """Not supported."""
        raise_unsupported("share_memory")


def _unpickle(cls: type[ModuleHandle], *identity: Any) -> ModuleHandle:
    return cls._from_rref(*identity)


keep_uncompiled(__name__)
