"""Profiler events for the caller's side of a call. The rest of torch's RPC profiling is refused with an error.

Torch also brings the events of a remote function into the profiler of its caller, profiles all calls that a worker
serves, and measures how long calls wait for Python's interpreter lock. Telegrad does none of this. Functions that ask
for it raise an error that names an alternative.
"""

from __future__ import annotations

import contextlib
from typing import Any, NoReturn

import torch
from torch._C._autograd import _profiler_enabled

from telegrad.backward.graph_breaks import keep_uncompiled
from telegrad.drop_in.rpc.agents import get_current_agent
from telegrad.drop_in.rpc.internal import RPCExecMode, _build_rpc_profiling_key
from telegrad.worker_info import WorkerInfo

_REMEDY = "Run torch.profiler inside the functions that are called, and return or save its results"


def _get_should_profile() -> bool:
    """Return whether a profiler is active in this thread. It sees the caller's side of calls."""
    return bool(_profiler_enabled())


def _enable_rpc_profiler(
    should_profile: bool, qualified_name: str | None, func: Any, rpc_type: RPCExecMode, dst_worker_info: WorkerInfo
) -> Any:
    """Return a profiler event for a block that makes a call. `qualified_name` is the name of a torch operator."""
    if not should_profile:
        return contextlib.nullcontext()
    name = qualified_name or getattr(func, "qualified_name", "") or getattr(func, "__qualname__", repr(func))
    caller: WorkerInfo = get_current_agent().get_worker_info()
    key = _build_rpc_profiling_key(rpc_type, str(name), caller.name, dst_worker_info.name)
    return torch.autograd.profiler.record_function(key)


def _record_call(mode: RPCExecMode, func: Any, to: int) -> Any:
    """Return a profiler event for the caller's side of a call, or a null context if no profiler is active."""
    if not _profiler_enabled():
        return contextlib.nullcontext()
    builtin = torch.jit._builtins._find_builtin(func)  # type: ignore[no-untyped-call]
    return _enable_rpc_profiler(True, builtin, func, mode, get_current_agent().get_worker_info(to))


def _refuse(feature: str, remedy: str = _REMEDY) -> NoReturn:
    raise RuntimeError(f"telegrad does not {feature}. {remedy}")


class RemoteProfilerManager:
    """Names the events of the next call in torch's profiler, on the worker that it runs on."""

    @staticmethod
    def set_current_profiling_key(key: str) -> None:
        """Raise an error: no events come from other workers, so there are none to name."""
        _refuse(f"bring the profiler's events of a call to its caller, so {key!r} cannot name them")


def _enable_server_process_global_profiler(new_config: Any) -> None:
    """Raise an error; see the module's docstring."""
    _refuse("profile all calls that a worker serves")


def _disable_server_process_global_profiler() -> Any:
    """Raise an error: it can never have been enabled."""
    _refuse("profile all calls that a worker serves")


def _set_profiler_node_id(default_node_id: int) -> None:
    """Raise an error: the id tells on which worker an event happened, and all events are of this one."""
    _refuse("number the profiler's events by worker: this worker's are the only ones")


def enable_gil_profiling(flag: bool) -> None:
    """Accept False and refuse True: a Python thread cannot observe its wait for the GIL."""
    if flag:
        _refuse("measure how long calls wait for Python's interpreter lock", "Use py-spy or perf")


keep_uncompiled(__name__)
