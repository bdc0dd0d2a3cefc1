"""Autograd across machines: remote calls, and one backward pass through all participating workers.

Try it at the prompt, on a group of this process and two workers that are started for it:

    import telegrad, torch

    with telegrad.launch.workers(2):
        x = torch.ones(3, requires_grad=True)
        with telegrad.autograd.context() as context_id:
            loss = telegrad.rpc_sync("worker0", torch.mul, (x, 2)).sum()
            telegrad.autograd.backward(context_id, [loss])
            print(telegrad.autograd.get_gradients(context_id)[x])

What is where:

    telegrad           init_rpc, shutdown; rpc_sync, rpc_async, remote; barrier, all_gather, broadcast, call_all
    telegrad.rpc       the same, and the workers of the group: workers, wait_for_worker, on_worker_lost, traffic
    telegrad.autograd  context, backward, grad, get_gradients
    telegrad.optim     DistributedOptimizer, clip_grad_norm_
    telegrad.nn        RemoteModule, split, parameter_rrefs
    telegrad.launch    workers, local, start, and one module for each launcher: ray, slurm, mpi, torchrun, ssh
    telegrad.recovery  snapshots of a training, and going back to them after a loss
    telegrad.errors    every exception
    telegrad.testing   a simulated network, clock and scheduler

In a shell: `telegrad run`, `telegrad doctor`, `telegrad --help`.
"""

# The names of `__all__` are imported on first use: torch takes seconds to load, and `telegrad --version` does not need
# it.

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"  # the only place: pyproject.toml reads it from here

if TYPE_CHECKING:
    from telegrad.rpc import (
        Future,
        Options,
        PeerLimits,
        RRef,
        WorkerInfo,
        all_gather,
        barrier,
        broadcast,
        call_all,
        expose,
        get_worker_info,
        idempotent,
        init_rpc,
        register,
        remote,
        rpc_async,
        rpc_sync,
        shutdown,
    )


__all__ = [
    "Future",
    "Options",
    "PeerLimits",
    "RRef",
    "WorkerInfo",
    "__version__",
    "all_gather",
    "barrier",
    "broadcast",
    "call_all",
    "expose",
    "get_worker_info",
    "idempotent",
    "init_rpc",
    "register",
    "remote",
    "rpc_async",
    "rpc_sync",
    "shutdown",
]


_SUBMODULES = frozenset(("autograd", "errors", "launch", "nn", "observe", "optim", "recovery", "rpc", "testing"))


_ELSEWHERE = {
    "launch": ("local", "start", "workers"),
    "autograd": ("backward", "context", "get_gradients", "grad"),
    "nn": ("RemoteModule", "gradients", "named_parameter_rrefs", "parameter_rrefs", "remote_modules", "split"),
    "optim": ("DistributedOptimizer", "clip_grad_norm_"),
    "observe": ("dump", "profile", "report", "view"),
}
"""Names of submodules that users look for in the package. Nothing is imported to answer them."""


def __getattr__(name: str) -> Any:
    if name in _SUBMODULES:
        return importlib.import_module(f"telegrad.{name}")
    if name in __all__:  # all but __version__, which exists, are names of telegrad.rpc
        from telegrad import rpc

        return getattr(rpc, name)
    hint = ""
    if name[0].isupper() and hasattr(importlib.import_module("telegrad.errors"), name):
        hint = f": did you mean telegrad.errors.{name}?"
    for module, names in _ELSEWHERE.items():
        if name in names:
            hint = f": did you mean telegrad.{module}.{name}?"
    raise AttributeError(f"module 'telegrad' has no attribute {name!r}{hint}", name=name, obj=sys.modules[__name__])


def __dir__() -> list[str]:
    # Without what this module imports for itself, and without internal packages that happen to be loaded.
    return sorted({*__all__, *_SUBMODULES, *(name for name in globals() if name.startswith("__"))})
