"""A module that lives on another worker, and can be used here as if it were here."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn, Self

import torch

from telegrad.autograd.contexts import current
from telegrad.errors import PayloadError, TelegradError
from telegrad.nn import there
from telegrad.nn.places import mapped, moved, parse_place
from telegrad.rpc.api import remote
from telegrad.rpc.futures import Future
from telegrad.rpc.rref import Proxy, RRef, call_through

_DTYPES = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
)


class RemoteModule(torch.nn.Module):
    """A module that is made on another worker and stays there; what is called here runs there, and gradients flow back.

    `remote_device` is "worker", "worker/cuda:0" or "rank:1/cpu". ``module_cls(*args, **kwargs)`` is called there; this
    returns at once, and an error of it shows when the module is first used. Calls, also of other methods of the module,
    are calls of `telegrad.rpc`: in an autograd context they are recorded, and `WorkerLost` names a worker that died.

    >>> encoder = telegrad.nn.RemoteModule("worker1/cpu", torch.nn.Linear, (20, 30))     # doctest: +SKIP
    >>> with telegrad.autograd.context() as context:                                     # doctest: +SKIP
    ...     context.backward(encoder(torch.randn(128, 20)).sum())

    Inside an ordinary module it takes part in `state_dict`, `load_state_dict`, `train`, `eval`, `apply` and casts; its
    parameters are not among `parameters()`, because they are not here: `telegrad.nn.parameter_rrefs` has them all.
    """

    on: str | int
    """The worker: its name, or its id if it was given as a rank."""
    device: str
    """The device there."""
    module_rref: RRef[torch.nn.Module]
    is_scriptable: bool
    """Always false: TorchScript can call PyTorch's own RPC only."""

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
        self._stand_for(place.on, place.device, made, getattr(module_cls, "__name__", "module"), True)

    @staticmethod
    def init_from_module_rref(
        remote_device: str, module_rref: RRef[torch.nn.Module], _module_interface_cls: Any = None
    ) -> RemoteModule:
        """Another RemoteModule for a module that there is already. It is called where it lives, on this device."""
        place = parse_place(remote_device)
        return RemoteModule._of(module_rref, place.on, place.device, "module", True)

    @classmethod
    def _of(cls, rref: RRef[Any], on: str | int, device: str, label: str, training: bool) -> Self:
        made = cls.__new__(cls)
        made._stand_for(on, device, rref, label, training)
        return made

    def _stand_for(self, on: str | int, device: str, rref: RRef[Any], label: str, training: bool) -> None:
        torch.nn.Module.__init__(self)
        self.on, self.device, self.module_rref, self.is_scriptable = on, device, rref, False
        self.training = training
        self._label = label

    # -- calls ------------------------------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module, there, with its hooks, and wait for the result."""
        result = self._call(self.module_rref.rpc_sync(), "__call__", args, kwargs)
        return result if _in_a_context() else _guarded(result, self, args, kwargs)

    def forward_async(self, *args: Any, **kwargs: Any) -> Future[Any]:
        """Call the module, and return a future of the result."""
        future: Future[Any] = self._call(self.module_rref.rpc_async(), "__call__", args, kwargs)
        if _in_a_context() or not torch.is_grad_enabled():
            return future
        return future.then(lambda done: _guarded(done.value(), self, args, kwargs))

    def _call(self, proxy: Proxy, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a method of the module, in this thread's grad mode."""
        args, kwargs = moved(args, "cpu"), moved(kwargs, "cpu")
        grad = torch.is_grad_enabled()
        # In a context the call itself says that there is no grad.
        if name == "__call__" and self.device == "cpu" and (grad or _in_a_context()):
            return proxy.__call__(*args, **kwargs)  # the module's: a proxy has none
        return call_through(proxy, there.call, name, self.device, args, kwargs, grad)

    def __getattr__(self, name: str) -> Any:
        """Whatever the module has that this class has not: a method as a function to call, a value as a copy."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("_") or "module_rref" not in self.__dict__:
                raise
        kind, value = self._run(there.look, name)
        if kind == "module":
            rref, label, training = value
            return type(self)._of(rref, self.on, self.device, label, training)
        if kind == "value":
            return value if _in_a_context() else _guarded(value, self)

        def method(*args: Any, **kwargs: Any) -> Any:
            result = self._call(self.module_rref.rpc_sync(), name, args, kwargs)
            if result is there.Itself:
                return self
            return result if _in_a_context() else _guarded(result, self, args, kwargs)

        method.__name__ = name
        return method

    def _run(self, function: Callable[..., Any], *args: Any) -> Any:
        return call_through(self.module_rref.rpc_sync(), function, *args)

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

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Switch gradients of the module's parameters on or off."""
        self._run(there.requires_grad, requires_grad)
        return self

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget what the module's parameters have in ``.grad``."""
        self._run(there.zero_grad, set_to_none)

    # -- mode, device and dtype ---------------------------------------------------------------------------------------

    def train(self, mode: bool = True) -> Self:
        """Set the mode of the module; `eval` is ``train(False)``."""
        self._run(there.train, bool(mode))
        self.training = bool(mode)
        return self

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
        self.device = target
        return self

    def cpu(self) -> Self:
        """Move the module to the CPU of its worker."""
        return self.to("cpu")

    def cuda(self, device: int | torch.device | None = None) -> Self:
        """Move the module to a CUDA device of its worker."""
        return self.to(torch.device("cuda", device) if isinstance(device, int) else device or "cuda")

    def xpu(self, device: int | torch.device | None = None) -> Self:
        """Move the module to an XPU of its worker."""
        return self.to(torch.device("xpu", device) if isinstance(device, int) else device or "xpu")

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        """Called when this or a module around it is cast or moved; a cast is done there, too, and a move is not.

        What `fn` casts is seen by what it does to empty tensors.
        """
        with torch.no_grad():
            casts = {dtype: fn(torch.empty(0, dtype=dtype)).dtype for dtype in _DTYPES}
        casts = {old: new for old, new in casts.items() if old != new}
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

    # -- sent, copied, shown ------------------------------------------------------------------------------------------

    def __reduce_in_call__(self) -> tuple[Any, ...]:
        """Sent in a call it is a handle on the same module; see `telegrad.wire.payload`."""
        return _received, (type(self), self.module_rref, self.on, self.device, self._label, self.training)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise PayloadError(
            "Cannot pickle RemoteModule in python pickler. RemoteModule can only be pickled when using RPC. To save a "
            "model, save its state_dict()"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A copy of the module, on the same worker."""
        copied = call_through(self.module_rref.remote(), copy.deepcopy)
        made = self._of(copied, self.on, self.device, self._label, self.training)
        memo[id(self)] = made
        return made

    def extra_repr(self) -> str:
        """What stands between the brackets when it is printed."""
        return self._described()

    def _described(self) -> str:
        return f"{self._label} on {self.on!r}, device={self.device!r}"

    # -- what would be here, and so not in the module ------------------------------------------------------------------

    def register_buffer(self, name: str, tensor: torch.Tensor | None, persistent: bool = True) -> NoReturn:
        """Not supported."""
        _refuse("register_buffer")

    def register_parameter(self, name: str, param: torch.nn.Parameter | None) -> NoReturn:
        """Not supported."""
        _refuse("register_parameter")

    def add_module(self, name: str, module: torch.nn.Module | None) -> NoReturn:
        """Not supported."""
        _refuse("add_module")


class OutsideContext(torch.autograd.Function):
    """Stands where the graph of a call would go on, had the call been made in an autograd context."""

    @staticmethod
    def forward(ctx: Any, value: list[torch.Tensor], source: str, *sources: torch.Tensor) -> torch.Tensor:
        ctx.source = source
        return value[0]  # not an argument itself: it would come back as a view, which cannot be changed in place

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> NoReturn:
        raise TelegradError(
            f"a backward pass reached {ctx.source}, which was called outside of an autograd context, so its gradients "
            "cannot be computed. Run forward and backward inside `with telegrad.autograd.context() as context_id:`, "
            "and call telegrad.autograd.backward(context_id, [loss]). What is only evaluated belongs in torch.no_grad()"
        )


def _in_a_context() -> bool:
    """Whether what comes now is recorded."""
    context = current.get()
    return context is not None and not context.released


def _guarded(value: Any, module: RemoteModule, *args: Any) -> Any:
    """What came from a call outside of a context, so that a backward pass into it is an error and no wrong gradient.

    It leads on to the arguments: torch looks only for ways to what gradients are wanted of.
    """
    source = f"RemoteModule({module._described()})"
    if not torch.is_grad_enabled():
        return mapped(value, torch.Tensor.detach)
    guard: Callable[..., Any] = OutsideContext.apply  # torch gives it no types
    sources = [torch.empty(0, requires_grad=True)]

    def collect(x: torch.Tensor) -> torch.Tensor:
        sources.append(x)
        return x

    mapped(args, collect)
    return mapped(value, lambda x: guard([x.detach()], source, *sources) if x.requires_grad else x)


def _refuse(name: str) -> NoReturn:
    raise ValueError(
        f"Method ``{name}`` not supported for RemoteModule: it would add to the module here, and not to the one on the "
        "worker. Add it in the class that the worker builds, or with apply(), which runs a function on the module there"
    )


def _received(cls: type[RemoteModule], *what: Any) -> RemoteModule:
    return cls._of(*what)


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name
