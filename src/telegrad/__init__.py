"""Autograd across machines: remote calls, and one backward pass through all participating workers.

The names below are imported on first use, because torch takes seconds to load and ``telegrad --version`` does not need
it.
"""

from __future__ import annotations

import importlib
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


_SUBMODULES = frozenset(("autograd", "errors", "launch", "nn", "optim", "recovery", "rpc", "testing"))


def __getattr__(name: str) -> Any:
    if name in _SUBMODULES:
        return importlib.import_module(f"telegrad.{name}")
    if name in __all__:  # all but __version__, which exists, are names of telegrad.rpc
        from telegrad import rpc

        return getattr(rpc, name)
    raise AttributeError(f"module 'telegrad' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_SUBMODULES})
