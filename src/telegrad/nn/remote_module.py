"""A module that lives on another worker, and can be used here as if it were here."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NoReturn, Self

import torch

from telegrad.backward.graph_breaks import keep_uncompiled
from telegrad.errors import PayloadError, TelegradError
from telegrad.futures import Future
from telegrad.nn import remote_ops as there
from telegrad.nn.elsewhere import Elsewhere, refuse
from telegrad.nn.outside import guarded, in_a_context
from telegrad.nn.placement import moved, parse_place
from telegrad.nn.tracing import call_node
from telegrad.rpc.api import remote
from telegrad.rref.handle import Proxy, RRef, call_through

_DTYPES = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
)

_OF_THE_HANDLE = frozenset(torch.nn.Module().__dict__) - {"training"}
"""What torch keeps in every module; of a RemoteModule this is the handle's own. Mode and all else is the module's."""

_NAMES_IT = frozenset({"on", "device", "module_rref", "is_scriptable", "_label", "_assigned"})
"""What names the module, and belongs to the handle."""


class RemoteModule(torch.nn.Module):
    """A module that is made on another worker and stays there; what is called here runs there, and gradients flow back.

    `remote_device` is "worker", "worker/cuda:0" or "rank:1/cpu". ``module_cls(*args, **kwargs)`` is called there; this
    returns at once, and an error of it shows when the module is first used. Calls, also of other methods of the module,
    are calls of `telegrad.rpc`: in an autograd context they are recorded, and `WorkerLost` names a worker that died.

    >>> encoder = telegrad.nn.RemoteModule("worker1/cpu", torch.nn.Linear, (20, 30))
    >>> with telegrad.autograd.context() as context:
    ...     context.backward(encoder(torch.randn(128, 20)).sum())

    Attributes are the module's: they are read and assigned there. Inside an ordinary module it takes part in
    `state_dict`, `load_state_dict`, `train`, `eval`, `apply` and casts; its parameters are not among `parameters()`,
    because they are not here: `telegrad.nn.parameter_rrefs` has them all.
    """

    if TYPE_CHECKING:  # at run time TorchScript would read these, and it knows no unions
        on: str | int
        """The worker: its name, or its id if it was given as a rank."""
        device: str
        """The device there."""
        module_rref: RRef[torch.nn.Module]
        is_scriptable: bool
        """Whether torch.jit.script can compile it: the drop-in's only, if it was given an interface."""

    _assigned = frozenset[str]()  # private names that were assigned through this object

    def __init__(
        self,
        remote_device: str,
        module_cls: Callable[..., torch.nn.Module],
        args: tuple[Any, ...] | None = None,
        kwargs: dict[str, Any] | None = None,
        _module_interface_cls: Any = None,
    ) -> None:
        place = parse_place(remote_device)
        scripted = _module_interface_cls is not None
        made = remote(place.on, there.build, (module_cls, tuple(args or ()), kwargs or {}, place.device, scripted))
        self._stand_for(place.on, place.device, made, getattr(module_cls, "__name__", "module"))

    @staticmethod
    def init_from_module_rref(
        remote_device: str, module_rref: RRef[torch.nn.Module], _module_interface_cls: Any = None
    ) -> RemoteModule:
        """Another RemoteModule for a module that there is already. It is called where it lives, on this device."""
        place = parse_place(remote_device)
        return RemoteModule._of(module_rref, place.on, place.device, "module")

    @classmethod
    def _of(cls, rref: RRef[Any], on: str | int, device: str, label: str) -> Self:
        made = cls.__new__(cls)
        made._stand_for(on, device, rref, label)
        return made

    def _stand_for(self, on: str | int, device: str, rref: RRef[Any], label: str) -> None:
        torch.nn.Module.__init__(self)
        mine = self.__dict__
        del mine["training"]  # the module's, and asked for there
        mine.update(on=on, device=device, module_rref=rref, is_scriptable=False, _label=label)
        for kind in ("_parameters", "_buffers", "_modules"):
            mine[kind] = Elsewhere(self._shown())

    # -- calls ------------------------------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module, there, with its hooks, and wait for the result."""
        try:
            result = self._call(self.module_rref.rpc_sync(), "__call__", args, kwargs)
        except Exception:
            node = call_node(self, args, kwargs)
            if node is None:
                raise
            return node
        return result if in_a_context() else guarded(result, self._shown(), args, kwargs)

    def forward_async(self, *args: Any, **kwargs: Any) -> Future[Any]:
        """Call the module, and return a future of the result."""
        future: Future[Any] = self._call(self.module_rref.rpc_async(), "__call__", args, kwargs)
        if in_a_context() or not torch.is_grad_enabled():
            return future
        return future.then(lambda done: guarded(done.value(), self._shown(), args, kwargs))

    def _call(self, proxy: Proxy, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a method of the module, in this thread's grad mode."""
        args, kwargs = moved(args, "cpu"), moved(kwargs, "cpu")
        grad = torch.is_grad_enabled()
        # In a context the call itself says that there is no grad.
        if name == "__call__" and self.device == "cpu" and (grad or in_a_context()):
            return proxy.__call__(*args, **kwargs)  # the module's: a proxy has none
        return call_through(proxy, there.call, name, self.device, args, kwargs, grad)

    def _run(self, function: Callable[..., Any], *args: Any) -> Any:
        return call_through(self.module_rref.rpc_sync(), function, *args)

    # -- attributes -------------------------------------------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        """Whatever the module has that this class has not: a method as a function to call, a value as a copy."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            # Torch looks at modules for private names, and would take this one for what the module there is. So of
            # those only what was assigned through this object is looked up there.
            hidden = name.startswith("_") and name not in self._assigned
            if hidden or "module_rref" not in self.__dict__:
                raise
        kind, value = self._run(there.look, name)
        if kind == "module":
            return self._handle_on(value)
        if kind == "value":
            return value if in_a_context() else guarded(value, self._shown())

        def method(*args: Any, **kwargs: Any) -> Any:
            result = self._call(self.module_rref.rpc_sync(), name, args, kwargs)
            if result is there.Itself:
                return self
            return result if in_a_context() else guarded(result, self._shown(), args, kwargs)

        method.__name__ = name
        return method

    def __setattr__(self, name: str, value: Any) -> None:
        """Assign an attribute of the module, there; a copy of the value goes there. Raises if a copy would not do."""
        if self._is_local(name):
            super().__setattr__(name, value)
            return
        if isinstance(value, torch.Tensor | torch.nn.Module) and not isinstance(value, RemoteModule):
            raise TelegradError(
                f"cannot assign a {type(value).__name__} to {name!r} of {self._shown()}: the worker would get a copy, "
                "which neither shares changes nor gradients with yours. Use load_state_dict() to give it values, or "
                "apply() to run a function there that assigns it. (torch.func.functional_call assigns, too: call it "
                "on the worker)"
            )
        self._run(there.assign, name, value)
        if name.startswith("_"):
            self.__dict__["_assigned"] = self._assigned | {name}

    def __delattr__(self, name: str) -> None:
        """Delete an attribute of the module, there."""
        if self._is_local(name):
            super().__delattr__(name)
        else:
            self._run(there.delete, name)
            if name in self._assigned:
                self.__dict__["_assigned"] = self._assigned - {name}

    def _is_local(self, name: str) -> bool:
        """Whether an attribute is this object's own, and not the module's; raises for what must not be changed."""
        if "module_rref" not in self.__dict__ or name in _OF_THE_HANDLE or name.startswith("__"):
            return True
        if name in _NAMES_IT:
            raise TelegradError(f"{name!r} of {self._shown()} cannot be changed; use to() to move it to another device")
        if not hasattr(type(self), name):
            return False
        if inspect.isroutine(inspect.getattr_static(type(self), name)):
            raise TelegradError(
                f"{name}() of {self._shown()} cannot be replaced: the module on the worker would not see it. Use "
                "apply() to run a function there that replaces it, or a forward hook"
            )
        return True  # a subclass's own

    def _handle_on(self, what: tuple[RRef[Any], str]) -> Self:
        """A RemoteModule for a submodule: its reference and the name of its class."""
        rref, label = what
        return self._of(rref, self.on, self.device, label)

    # -- parameters -------------------------------------------------------------------------------------------------

    def get_module_rref(self) -> RRef[torch.nn.Module]:
        """The reference to the module."""
        return self.module_rref

    def remote_parameters(self, recurse: bool = True) -> list[RRef[torch.nn.Parameter]]:
        """References to the module's parameters, for a distributed optimizer."""
        return [rref for _, rref in self._run(there.parameters, recurse, False)]

    def named_parameters(  # type: ignore[override]  # they are not here: references stand for them
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, RRef[torch.nn.Parameter]]]:
        """References to the module's parameters, by name."""
        named = self._run(there.parameters, recurse, not remove_duplicate)
        yield from ((_join(prefix, name), rref) for name, rref in named)

    def named_buffers(  # type: ignore[override]  # as above
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, RRef[torch.Tensor]]]:
        """References to the module's buffers, by name."""
        named = self._run(there.buffers, recurse, not remove_duplicate)
        yield from ((_join(prefix, name), rref) for name, rref in named)

    def get_parameter(self, target: str) -> RRef[torch.nn.Parameter]:  # type: ignore[override]  # as above
        """A reference to the parameter of that name; names of submodules come before it, with dots."""
        return self._run(there.parameter, target)  # type: ignore[no-any-return]

    def get_buffer(self, target: str) -> RRef[torch.Tensor]:  # type: ignore[override]  # as above
        """The same, of a buffer."""
        return self._run(there.buffer, target)  # type: ignore[no-any-return]

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Switch gradients of the module's parameters on or off."""
        self._run(there.requires_grad, requires_grad)
        return self

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget what the module's parameters have in ``.grad``."""
        self._run(there.zero_grad, set_to_none)

    # -- submodules ---------------------------------------------------------------------------------------------------

    def named_children(self) -> Iterator[tuple[str, torch.nn.Module]]:
        """RemoteModules for the module's direct submodules, by name."""
        for name, what in self._run(there.children):
            yield name, self._handle_on(what)

    def named_modules(
        self, memo: set[torch.nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.nn.Module]]:
        """This, and RemoteModules for all submodules, by name. In the list of a module around it, this alone."""
        if memo is not None:
            yield from super().named_modules(memo, prefix, remove_duplicate)
            return
        yield prefix, self
        for name, what in self._run(there.submodules, not remove_duplicate):
            yield _join(prefix, name), self._handle_on(what)

    def get_submodule(self, target: str) -> torch.nn.Module:
        """A RemoteModule for the submodule of that name."""
        return self._handle_on(self._run(there.submodule, target)) if target else self

    # -- mode, device and dtype ---------------------------------------------------------------------------------------

    def train(self, mode: bool = True) -> Self:
        """Set the mode of the module; `eval` is ``train(False)``."""
        self._run(there.train, mode)
        return self

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Have the worker compile the module, with the arguments of ``torch.compile``."""
        self._run(there.compiled, args, kwargs)

    def apply(self, fn: Callable[[torch.nn.Module], None]) -> Self:
        """Run `fn` on the module and on all in it, there; so it must be a function that can be sent."""
        self._run(there.apply, fn)
        return self

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Move the module to another device of its worker, or cast it, with the arguments of ``nn.Module.to``."""
        device = kwargs.get("device", args[0] if args else None)
        if isinstance(device, torch.Tensor):
            args, device = (device.device, device.dtype, *args[1:]), device.device
        if isinstance(device, int) and not isinstance(device, bool):
            device = torch.device(device)
        target = str(torch.device(device)) if isinstance(device, str | torch.device) else self.device
        self._run(there.to, args, kwargs, target)
        self.__dict__["device"] = target
        return self

    def to_empty(self, *, device: str | torch.device | int | None, recurse: bool = True) -> Self:
        """Move the module to another device of its worker, without its values."""
        target = str(torch.device(device)) if device is not None else self.device
        self._run(there.to_empty, target, recurse)
        self.__dict__["device"] = target
        return self

    def cpu(self) -> Self:
        """Move the module to the CPU of its worker."""
        return self.to("cpu")

    def cuda(self, device: int | torch.device | None = None) -> Self:
        """Move the module to a CUDA device of its worker."""
        return self._to_kind("cuda", device)

    def xpu(self, device: int | torch.device | None = None) -> Self:
        """Move the module to an XPU of its worker."""
        return self._to_kind("xpu", device)

    def mtia(self, device: int | torch.device | None = None) -> Self:
        """Move the module to an MTIA device of its worker."""
        return self._to_kind("mtia", device)

    def ipu(self, device: int | torch.device | None = None) -> Self:
        """Move the module to an IPU of its worker."""
        return self._to_kind("ipu", device)

    def _to_kind(self, kind: str, device: int | torch.device | None) -> Self:
        return self.to(torch.device(kind, device) if isinstance(device, int) else device or kind)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        """Called when this or a module around it is cast or moved; a cast is done there, too, and a move is not.

        What `fn` casts is seen by what it does to empty tensors.
        """
        with torch.no_grad():
            tried: dict[torch.dtype, Any] = {dtype: fn(torch.empty(0, dtype=dtype)) for dtype in _DTYPES}
        if any(tensor.device.type == "cpu" and tensor.is_shared() for tensor in tried.values()):
            refuse("share_memory")
        casts = {old: tensor.dtype for old, tensor in tried.items() if old != tensor.dtype}
        if casts:
            self._run(there.cast, casts)
        return self

    # -- state: called by state_dict() and load_state_dict() of this module and of those around it --------------------

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        if keep_vars:
            raise TelegradError(
                "state_dict(keep_vars=True) of a RemoteModule is not possible: its parameters live on worker "
                f"{self.on!r}, and copies of them have no gradients. Call what needs them there, or leave keep_vars out"
            )
        saved, notes = self._run(there.state)
        for name, value in saved.items():
            destination[prefix + name] = value
        metadata = getattr(destination, "_metadata", None)
        if metadata is not None:
            for name, note in notes.items():
                metadata[(prefix + name).rstrip(".")] = note

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        saved = {name.removeprefix(prefix): value for name, value in state_dict.items() if name.startswith(prefix)}
        with torch.no_grad():  # or values that require grad would be recorded
            saved = {name: moved(value, "cpu") for name, value in saved.items()}
            notes = dict(local_metadata)
            assign = notes.pop("assign_to_params_buffers", False)
            missing, unexpected, errors = self._run(there.load, saved, notes, assign)
        missing_keys += [prefix + name for name in missing]
        unexpected_keys += [prefix + name for name in unexpected]
        error_msgs += errors

    def get_extra_state(self) -> Any:
        """What the module's method of that name returns."""
        return self._run(there.get_extra_state)

    def set_extra_state(self, state: Any) -> None:
        """Call the module's method of that name."""
        self._run(there.set_extra_state, state)

    # -- sent, copied, shown ------------------------------------------------------------------------------------------

    def __reduce_in_call__(self) -> tuple[Any, ...]:
        """Sent in a call it is a handle on the same module; see `telegrad.wire.payload`."""
        return _received, (type(self), self.module_rref, self.on, self.device, self._label)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise PayloadError(
            "Cannot pickle RemoteModule in python pickler. RemoteModule can only be pickled when using RPC. To save a "
            "model, save its state_dict()"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A copy of the module, on the same worker; hooks of this object are copied here."""
        made = self._copied(copy.deepcopy)
        memo[id(self)] = made
        made.__dict__.update({name: copy.deepcopy(value, memo) for name, value in self._kept().items()})
        return made

    def __copy__(self) -> Self:
        """The same, as shallow as ``copy.copy`` of the module: it shares the parameters."""
        made = self._copied(copy.copy)
        made.__dict__.update(self._kept())
        return made

    def _copied(self, function: Callable[[Any], Any]) -> Self:
        return self._of(call_through(self.module_rref.remote(), function), self.on, self.device, self._label)

    def _kept(self) -> dict[str, Any]:
        """What this object has of its own, beside what names the module."""
        named = _NAMES_IT - {"_assigned"}
        return {
            name: value
            for name, value in self.__dict__.items()
            if name not in named and not isinstance(value, Elsewhere)
        }

    def extra_repr(self) -> str:
        """What stands between the brackets when it is printed."""
        return self._described()

    def _described(self) -> str:
        return f"{self._label} on {self.on!r}, device={self.device!r}"

    def _shown(self) -> str:
        return f"RemoteModule({self._described()})"

    # -- what would be here, and so not in the module ------------------------------------------------------------------

    def register_buffer(self, name: str, tensor: torch.Tensor | None, persistent: bool = True) -> NoReturn:
        """Not supported."""
        refuse("register_buffer")

    def register_parameter(self, name: str, param: torch.nn.Parameter | None) -> NoReturn:
        """Not supported."""
        refuse("register_parameter")

    def add_module(self, name: str, module: torch.nn.Module | None) -> NoReturn:
        """Not supported."""
        refuse("add_module")

    def register_module(self, name: str, module: torch.nn.Module | None) -> NoReturn:
        """Not supported."""
        refuse("register_module")

    def set_submodule(self, target: str, module: torch.nn.Module, strict: bool = False) -> NoReturn:
        """Not supported."""
        refuse("set_submodule")

    def share_memory(self) -> NoReturn:
        """Not supported."""
        refuse("share_memory")


def _received(cls: type[RemoteModule], *what: Any) -> RemoteModule:
    return cls._of(*what)


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


keep_uncompiled(__name__)
