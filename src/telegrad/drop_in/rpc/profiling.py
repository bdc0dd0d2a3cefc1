"""Torch's names for remote profiling: of the events of calls, and of the profiler of all calls that a worker serves.

Torch also measures how long calls wait for Python's interpreter lock. Telegrad does not, and asking for it is an error.
"""

from __future__ import annotations

import contextlib
import itertools
from typing import Any

import torch
from torch._C._autograd import _profiler_enabled

from telegrad.agent.agent import Agent
from telegrad.backward.graph_breaks import keep_uncompiled
from telegrad.drop_in.rpc.agents import get_current_agent, is_current_agent_set
from telegrad.drop_in.rpc.internal import RPCExecMode, _build_rpc_profiling_key
from telegrad.observe.profiling.extension import ServeProfiling, ServerProfile
from telegrad.observe.profiling.sessions import CallName, name_next_call, naming
from telegrad.worker_info import WorkerInfo


def _get_should_profile() -> bool:
    """Return whether a profiler is active in this thread. It sees the caller's side of calls."""
    return bool(_profiler_enabled())


def _enable_rpc_profiler(
    should_profile: bool, qualified_name: str | None, func: Any, rpc_type: RPCExecMode, dst_worker_info: WorkerInfo
) -> Any:
    """Name a call that is made in a block, in the profiler. `qualified_name` is the name of a torch operator."""
    if not should_profile:
        return contextlib.nullcontext()
    name = qualified_name or getattr(func, "qualified_name", "") or getattr(func, "__qualname__", repr(func))
    caller: WorkerInfo = get_current_agent().get_worker_info()
    key = _build_rpc_profiling_key(rpc_type, str(name), caller.name, dst_worker_info.name)
    return naming(key)


def _record_call(mode: RPCExecMode, func: Any, to: int) -> Any:
    """Name the call that a block makes, if a profiler is active; else return a null context."""
    if not _profiler_enabled():
        return contextlib.nullcontext()
    builtin = torch.jit._builtins._find_builtin(func)  # type: ignore[no-untyped-call]
    return _enable_rpc_profiler(True, builtin, func, mode, get_current_agent().get_worker_info(to))


def _profiling_future(agent: Agent, name: CallName, rref: Any) -> torch.futures.Future[Any]:
    """Return a future that is done when the profile of a call of `remote` has arrived."""
    if name.record is None:  # the profiler knows nothing of other workers
        future: torch.futures.Future[Any] = rref._get_future()
        return future
    arrived: torch.futures.Future[Any] = torch.futures.Future()
    times = itertools.count()

    def arrive() -> None:
        if not next(times):
            arrived.set_result(None)

    name.record.when_ended(lambda: agent.executor.submit(arrive))  # callbacks must not run on the thread that reads
    return arrived


class RemoteProfilerManager:
    """Names the events of the next call in torch's profiler, on the worker that it runs on."""

    @staticmethod
    def set_current_profiling_key(key: str) -> None:
        """Name the next call of this thread that is made under a profiler."""
        if not name_next_call(key):
            raise RuntimeError("Cannot call RemoteProfilerManager::setCurrentKey when current key is already set.")


_server_profiles: list[tuple[ServeProfiling, ServerProfile]] = []
"""Those that are enabled, the latest last."""


def _enable_server_process_global_profiler(new_config: Any, options: int = 0) -> None:
    """Record the functions of all calls that this worker serves, until it is disabled.

    The config is torch's, and cannot be read: `options` say what to record.
    """
    serving = get_current_agent().agent.profiling.serving
    profile = ServerProfile(options)
    serving.begin(profile)
    _server_profiles.append((serving, profile))


def _disable_server_process_global_profiler() -> list[list[list[Any]]]:
    """Stop what was enabled last. Returns the profiler's records: for each call, and each of its threads, a list."""
    if not _server_profiles:
        raise RuntimeError("Can't disable process-global profiler when it's not running.")
    serving, profile = _server_profiles.pop()
    serving.end(profile)
    return [segment.records for call in profile.calls for segment in call.segments()]


def _set_profiler_node_id(default_node_id: int) -> None:
    """Accept the id of this worker, which its events have in any case, and refuse others."""
    if is_current_agent_set() and default_node_id != get_current_agent().get_worker_info().id:
        raise RuntimeError("the profiler's events of a worker have the worker's id, and no other")


def enable_gil_profiling(flag: bool) -> None:
    """Accept False and refuse True: a Python thread cannot observe its wait for the GIL."""
    if flag:
        raise RuntimeError(
            "telegrad does not measure how long calls wait for Python's interpreter lock. Use py-spy or perf"
        )


keep_uncompiled(__name__)
