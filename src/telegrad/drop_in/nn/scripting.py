"""RemoteModule in TorchScript: methods with the types of a TorchScript interface that call the remote module.

TorchScript compiles the methods from source code, which is generated here from the interface. They leave TorchScript
through functions that it does not compile, and pass them the RemoteModule. TorchScript has no type for that, but it has
one for futures, and a future can hold any object. So the scripted module holds a completed future of the RemoteModule.

Results must have TorchScript's types, not Python's. TorchScript converts the result of an uncompiled function, but not
the value of a future. So `forward_async` starts the call at once, in the caller's autograd context, and returns a
forked task that waits for it and converts the result. The task occupies one of torch's inter-op threads until then.
"""

from __future__ import annotations

import functools
import importlib
import linecache
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any

import torch

_SOURCE = """\
def forward(self, {parameters}) -> {result}:
    return call(self._held, {arguments})


def forward_async(self, {parameters}) -> Future[{result}]:
    return torch.jit._fork(finish, begin(self._held, {arguments}))


def __getstate__(self):
    raise RuntimeError("{no_pickle}")


def __setstate__(self, state):
    raise RuntimeError("{no_pickle}")


@torch.jit.ignore
def call(held: Future[Any], {parameters}) -> {result}:
    return held.value().forward({arguments})


@torch.jit.ignore
def begin(held: Future[Any], {parameters}) -> Future[Any]:
    return hold(held.value().forward_async({arguments}))


@torch.jit.ignore
def finish(begun: Future[Any]) -> {result}:
    return begun.value().wait()
"""
_METHODS = ("forward_async", "forward", "__getstate__", "__setstate__")
_NO_PICKLE = (
    "Cannot pickle RemoteModule in python pickler. RemoteModule can only be pickled when using RPC. Passing a script "
    "RemoteModule over RPC is not supported. Please create a RemoteModule in the sender, send the `module_rref` to the "
    "receiver, and create a new instance on the receiver end by passing this `module_rref`."
)
ADDED = frozenset({*_METHODS, "_held", "__annotations__"})
"""The attributes that `make_scriptable` adds to a module."""


def make_scriptable(module: torch.nn.Module, interface: type, held: torch.nn.Module) -> tuple[Callable[..., Any], ...]:
    """Give a RemoteModule the methods of an interface, so that torch.jit.script can compile it, and return the methods.

    They call `held`, another RemoteModule for the same module. With `module` itself there would be a reference cycle.
    """
    made = _functions(interface)
    mine = module.__dict__
    mine.update(_held=_hold(held), __annotations__={"_held": torch.jit.Future[Any]})
    mine.update({name: types.MethodType(made[name], module) for name in _METHODS})
    return made["forward_async"], made["forward"]


def _hold(value: object) -> torch.futures.Future[Any]:
    """Return a completed future of a value, in which Python objects pass through TorchScript."""
    holder: torch.futures.Future[Any] = torch.futures.Future()
    holder.set_result(value)
    return holder


@functools.cache
def _functions(interface: type) -> Mapping[str, Callable[..., Any]]:
    """Return the functions for an interface, compiled by Python. torch.jit.script finds their source in `linecache`."""
    if not getattr(interface, "__torch_script_interface__", False):
        raise ValueError(f"module_interface_cls {interface} must be a type object decorated by @torch.jit.interface")
    instantiator: Any = importlib.import_module("torch.distributed.nn.jit.instantiator")  # takes a second
    arguments, parameters, result = instantiator.get_arg_return_types_from_interface(interface)
    source = _SOURCE.format(arguments=arguments, parameters=parameters, result=result, no_pickle=_NO_PICKLE)
    file = f"<RemoteModule with {interface.__module__}.{interface.__qualname__}>"
    lines = source.splitlines(keepends=True)
    linecache.cache[file] = (len(source), None, lines, file)
    names = {name: getattr(typing, name) for name in typing.__all__}
    names.update(torch=torch, Tensor=torch.Tensor, Future=torch.jit.Future, hold=_hold, __name__=__name__)
    exec(compile(source, file, "exec", dont_inherit=True), names)
    return {name: torch.jit.export(names[name]) for name in _METHODS}
