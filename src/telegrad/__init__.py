"""Autograd across machines: remote calls, and one backward pass through every worker that took part.

The names below are loaded when first used, so that ``telegrad --version`` need not wait for torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from telegrad.rpc import (
        Future,
        Options,
        RRef,
        WorkerInfo,
        all_gather,
        barrier,
        get_worker_info,
        init_rpc,
        register,
        remote,
        rpc_async,
        rpc_sync,
        shutdown,
    )

_FROM_RPC = frozenset(
    (
        "Future",
        "Options",
        "RRef",
        "WorkerInfo",
        "all_gather",
        "barrier",
        "get_worker_info",
        "init_rpc",
        "register",
        "remote",
        "rpc_async",
        "rpc_sync",
        "shutdown",
    )
)

__all__ = [
    "Future",
    "Options",
    "RRef",
    "WorkerInfo",
    "__version__",
    "all_gather",
    "barrier",
    "get_worker_info",
    "init_rpc",
    "register",
    "remote",
    "rpc_async",
    "rpc_sync",
    "shutdown",
]


_FOLDERS = frozenset(("autograd", "errors", "launch", "nn", "optim", "rpc", "testing"))


def __getattr__(name: str) -> Any:
    if name in _FOLDERS:
        return importlib.import_module(f"telegrad.{name}")
    if name in _FROM_RPC:
        from telegrad import rpc

        return getattr(rpc, name)
    raise AttributeError(f"module 'telegrad' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_FOLDERS})
