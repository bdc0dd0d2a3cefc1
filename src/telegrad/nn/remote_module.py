"""`RemoteModule`, a module on another worker that is used like a local one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Self

import torch

from telegrad.backward.graph_breaks import keep_uncompiled
from telegrad.calls.tracebacks import hide_frames
from telegrad.default_agent import default_agent
from telegrad.errors import TelegradError
from telegrad.futures import Future
from telegrad.nn import remote_ops
from telegrad.nn.context_guard import guard_result, in_context
from telegrad.nn.device_moves import MovableModule
from telegrad.nn.fx_tracing import trace_call
from telegrad.nn.nested_tensors import move_tensors
from telegrad.nn.placement import check_available, parse_remote_device
from telegrad.rpc.api import remote
from telegrad.rpc.arguments import positional
from telegrad.rref.handle import RRef


class RemoteModule(MovableModule):
    """A module on another worker: calls run there, and gradients flow back.

    `remote_device` is "worker", "worker/cuda:0" or "rank:1/cpu". The worker calls ``module_cls(*args, **kwargs)`` and
    moves the module to the device. In registered mode `module_cls` must be exposed there, and may be its name. The
    constructor returns at once; if it failed on the worker, the first use raises the error. Calls of the module and of
    its methods are calls of `telegrad.rpc`: they are recorded in an autograd context, and raise `WorkerLost` if the
    worker dies. Inputs are moved to the module's device. Results come back by the device map for the worker
    (`telegrad.Options.device_maps`), or on the CPU if it does not name their device.

    >>> encoder = telegrad.nn.RemoteModule("worker1/cpu", torch.nn.Linear, (20, 30))
    >>> with telegrad.autograd.context() as context:
    ...     context.backward(encoder(torch.randn(128, 20)).sum())

    Attributes are read and assigned on the worker. Inside a local module, `state_dict`, `load_state_dict`, `train`,
    `eval`, `apply` and casts of that module include it. Its parameters are not among the module's `parameters()`,
    because they are on the worker: use `telegrad.nn.parameter_rrefs`.
    """

    def __init__(
        self,
        remote_device: str,
        module_cls: Callable[..., torch.nn.Module] | str,
        args: tuple[Any, ...] | None = None,
        kwargs: dict[str, Any] | None = None,
        _module_interface_cls: Any = None,
    ) -> None:
        if isinstance(module_cls, torch.nn.Module):
            raise TypeError(
                f"module_cls must be a class, not a {type(module_cls).__name__} that exists: pass the class and its "
                f'arguments, as in RemoteModule("worker1", torch.nn.Linear, (20, 30)), or move the module with split()'
            )
        target = check_available(parse_remote_device(remote_device))
        scripted = _module_interface_cls is not None
        registry = default_agent().registry
        sent: Any = module_cls
        if registry is not None and not isinstance(module_cls, str):
            sent = registry.name_of(module_cls)
        if registry is not None and scripted:
            raise TelegradError("TorchScript modules cannot be created in registered mode: use an exposed nn.Module")
        build_args = (sent, positional(args), kwargs or {}, target.device, scripted)
        rref = remote(target.worker, remote_ops.build, build_args)
        self._bind(
            target.worker,
            target.device,
            rref,
            getattr(module_cls, "__name__", sent if isinstance(sent, str) else "module"),
        )

    @staticmethod
    def init_from_module_rref(
        remote_device: str, module_rref: RRef[torch.nn.Module], _module_interface_cls: Any = None
    ) -> RemoteModule:
        """Return a RemoteModule for an existing module. Its owner runs the calls, on this device."""
        target = check_available(parse_remote_device(remote_device))
        return RemoteModule._from_rref(module_rref, target.worker, target.device, "module")

    # -- calls ------------------------------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module with its hooks, and return the result."""
        try:
            result = self._call(self.module_rref.rpc_sync(), "__call__", args, kwargs)
        except Exception as error:
            node = trace_call(self, args, kwargs)
            if node is None:
                error.add_note(f"(in {self._display_name()})")
                hide_frames(error)
                raise
            return node
        return result if in_context() else guard_result(result, self._display_name(), args, kwargs)

    def forward_async(self, *args: Any, **kwargs: Any) -> Future[Any]:
        """Call the module with its hooks, and return a future of the result."""
        future: Future[Any] = self._call(self.module_rref.rpc_async(), "__call__", args, kwargs)
        if in_context() or not torch.is_grad_enabled():
            return future
        return future.then(lambda done: guard_result(done.value(), self._display_name(), args, kwargs))

    # -- parameters -------------------------------------------------------------------------------------------------

    def get_module_rref(self) -> RRef[torch.nn.Module]:
        """Return the reference to the module."""
        return self.module_rref

    def remote_parameters(self, recurse: bool = True) -> list[RRef[torch.nn.Parameter]]:
        """Return references to the module's parameters, for a distributed optimizer."""
        return [rref for _, rref in self._run(remote_ops.parameters, recurse, False)]

    def named_parameters(  # type: ignore[override]  # yields references instead of parameters
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, RRef[torch.nn.Parameter]]]:
        """Yield references to the module's parameters by name."""
        named = self._run(remote_ops.parameters, recurse, not remove_duplicate)
        yield from ((_join(prefix, name), rref) for name, rref in named)

    def named_buffers(  # type: ignore[override]  # as above
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, RRef[torch.Tensor]]]:
        """Yield references to the module's buffers by name."""
        named = self._run(remote_ops.buffers, recurse, not remove_duplicate)
        yield from ((_join(prefix, name), rref) for name, rref in named)

    def get_parameter(self, target: str) -> RRef[torch.nn.Parameter]:  # type: ignore[override]  # as above
        """Return a reference to a parameter by its dotted name."""
        return self._run(remote_ops.parameter, target)  # type: ignore[no-any-return]

    def get_buffer(self, target: str) -> RRef[torch.Tensor]:  # type: ignore[override]  # as above
        """Return a reference to a buffer by its dotted name."""
        return self._run(remote_ops.buffer, target)  # type: ignore[no-any-return]

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Switch gradients of the module's parameters on or off."""
        self._run(remote_ops.requires_grad, requires_grad)
        return self

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear ``.grad`` of the module's parameters."""
        self._run(remote_ops.zero_grad, set_to_none)

    # -- submodules ---------------------------------------------------------------------------------------------------

    def named_children(self) -> Iterator[tuple[str, torch.nn.Module]]:
        """Yield RemoteModules for the direct submodules by name."""
        for name, submodule in self._run(remote_ops.children):
            yield name, self._submodule_handle(submodule)

    def named_modules(
        self, memo: set[torch.nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.nn.Module]]:
        """Yield this module and RemoteModules for all its submodules by name; only this one if a parent is listed."""
        if memo is not None:
            yield from super().named_modules(memo, prefix, remove_duplicate)
            return
        yield prefix, self
        for name, submodule in self._run(remote_ops.submodules, not remove_duplicate):
            yield _join(prefix, name), self._submodule_handle(submodule)

    def get_submodule(self, target: str) -> torch.nn.Module:
        """Return a RemoteModule for a submodule by its dotted name."""
        return self._submodule_handle(self._run(remote_ops.submodule, target)) if target else self

    # -- mode -------------------------------------------------------------------------------------------------------

    def train(self, mode: bool = True) -> Self:
        """Set the mode of the module. `eval` is ``train(False)``."""
        self._run(remote_ops.train, mode)
        return self

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile the module on its worker, with the arguments of ``torch.compile``."""
        self._run(remote_ops.compile_forward, args, kwargs)

    def apply(self, fn: Callable[[torch.nn.Module], None]) -> Self:
        """Run `fn` on the module and all its submodules, on the worker. It must be possible to send `fn`."""
        self._run(remote_ops.apply, fn)
        return self

    # -- state: called by state_dict() and load_state_dict() of this module and its parents ---------------------------

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        if keep_vars:
            raise TelegradError(
                "state_dict(keep_vars=True) is not supported for RemoteModule: its parameters are on worker "
                f"{self.on!r}, and copies of them have no gradients. Use them there with apply(), or omit keep_vars"
            )
        saved, remote_metadata = self._run(remote_ops.get_state)
        for name, value in saved.items():
            destination[prefix + name] = move_tensors(value, "cpu")  # a device map may have sent it elsewhere
        metadata = getattr(destination, "_metadata", None)
        if metadata is not None:
            for name, entry in remote_metadata.items():
                metadata[(prefix + name).rstrip(".")] = entry

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
        with torch.no_grad():  # otherwise values that require grad would be recorded
            saved = {name: move_tensors(value, "cpu") for name, value in saved.items()}
            metadata = dict(local_metadata)
            assign = metadata.pop("assign_to_params_buffers", False)
            missing, unexpected, errors = self._run(remote_ops.load_state, saved, metadata, assign, self.device)
        missing_keys += [prefix + name for name in missing]
        unexpected_keys += [prefix + name for name in unexpected]
        error_msgs += errors

    def get_extra_state(self) -> Any:
        """Return the extra state of the module."""
        return self._run(remote_ops.get_extra_state)

    def set_extra_state(self, state: Any) -> None:
        """Set the extra state of the module."""
        self._run(remote_ops.set_extra_state, state)


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


keep_uncompiled(__name__)
