"""torch.distributed.rpc on telegrad: its names, signatures, defaults and error messages."""

from __future__ import annotations

import logging
import numbers
import threading
from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]  # public, but not in __all__
from torch.distributed.rendezvous import _create_store_from_options

from telegrad.backward.graph_breaks import keep_uncompiled
from telegrad.drop_in import autograd as dist_autograd
from telegrad.drop_in.rpc import (
    _utils,
    api,
    backend_registry,
    constants,
    functions,
    internal,
    options,
    server_process_global_profiler,
)
from telegrad.drop_in.rpc.agents import RpcAgent, TensorPipeAgent
from telegrad.drop_in.rpc.api import (
    AllGatherStates,
    PyRRef,
    RRef,
    _all_gather,
    _barrier,
    _delete_all_user_and_unforked_owner_rrefs,
    _destroy_rref_context,
    _get_current_rpc_agent,
    _is_current_rpc_agent_set,
    _require_initialized,
    _reset_current_rpc_agent,
    _rref_context_get_debug_info,
    _set_and_start_rpc_agent,
    _set_rpc_timeout,
    _wait_all,
    _wait_all_workers,
    get_rpc_timeout,
    get_worker_info,
    remote,
    rpc_async,
    rpc_sync,
    shutdown,
)
from telegrad.drop_in.rpc.backend_registry import (
    BackendValue,
    backend_registered,
    construct_rpc_backend_options,
    init_backend,
    register_backend,
)
from telegrad.drop_in.rpc.native_calls import (
    _cleanup_python_rpc_handler,
    _disable_jit_rref_pickle,
    _enable_jit_rref_pickle,
    _invoke_remote_builtin,
    _invoke_remote_python_udf,
    _invoke_remote_torchscript,
    _invoke_rpc_builtin,
    _invoke_rpc_python_udf,
    _invoke_rpc_torchscript,
)
from telegrad.drop_in.rpc.options import (
    RpcBackendOptions,
    TensorPipeRpcBackendOptions,
    _TensorPipeRpcBackendOptionsBase,
)
from telegrad.drop_in.rpc.profiling import (
    RemoteProfilerManager,
    _disable_server_process_global_profiler,
    _enable_server_process_global_profiler,
    _set_profiler_node_id,
    enable_gil_profiling,
)
from telegrad.drop_in.rpc.server_process_global_profiler import _server_process_global_profile
from telegrad.options import Options as _Options
from telegrad.rendezvous_store import open_store
from telegrad.worker_info import WorkerInfo

__all__ = [
    "AllGatherStates",
    "BackendType",
    "BackendValue",
    "RRef",
    "TensorPipeRpcBackendOptions",
    "backend_registered",
    "construct_rpc_backend_options",
    "get_worker_info",
    "init_backend",
    "init_rpc",
    "is_available",
    "register_backend",
    "remote",
    "rpc_async",
    "rpc_sync",
    "shutdown",
]

logger = logging.getLogger(__name__)

_DEFAULT_INIT_METHOD = constants.DEFAULT_INIT_METHOD
_DEFAULT_NUM_WORKER_THREADS = constants.DEFAULT_NUM_WORKER_THREADS
_DEFAULT_RPC_TIMEOUT_SEC = constants.DEFAULT_RPC_TIMEOUT_SEC
_UNSET_RPC_TIMEOUT = constants.UNSET_RPC_TIMEOUT
_INIT_TIMEOUT = 300.0
_is_tensorpipe_available = True
_init_counter = 0  # torch counts the groups of a process; here the store does
_init_counter_lock = threading.Lock()


def is_available() -> bool:
    """Return whether RPC is available: always True."""
    return True


def init_rpc(
    name: str,
    backend: Any = None,
    rank: int = -1,
    world_size: int | None = None,
    rpc_backend_options: Any = None,
) -> None:
    """Join the group as worker `name` and return when every worker has joined."""
    if backend is not None and not isinstance(backend, backend_registry.BackendType):
        raise TypeError("Argument backend must be a member of BackendType")
    if rpc_backend_options is not None and not isinstance(rpc_backend_options, RpcBackendOptions):
        raise TypeError("Argument rpc_backend_options must be an instance of RpcBackendOptions")
    if backend is None:
        backend = _infer_backend(rpc_backend_options)
    if rpc_backend_options is None:
        rpc_backend_options = backend_registry.construct_rpc_backend_options(backend)
    if world_size:
        url, ports = rpc_backend_options.init_method, _Options().allowed_ports()
        store, rank, world_size, *_ = open_store(url, rank, world_size, _INIT_TIMEOUT, ports)
    else:  # a dynamic group
        store = _create_store_from_options(rpc_backend_options, rank)  # type: ignore[no-untyped-call]
    store.set_timeout(timedelta(seconds=rpc_backend_options.rpc_timeout))
    dist_autograd._init(rank)
    _init_rpc_backend(backend, PrefixStore("telegrad_rpc", store), name, rank, world_size, rpc_backend_options)


def _infer_backend(rpc_backend_options: Any) -> Any:
    if rpc_backend_options is None:
        return backend_registry.BackendType.TENSORPIPE
    for candidate in backend_registry.BackendType:
        made = backend_registry.construct_rpc_backend_options(candidate)
        if isinstance(rpc_backend_options, type(made)):
            if candidate.name != "TENSORPIPE":
                logger.warning("init_rpc got no backend and uses %s, to which its options belong", candidate)
            return candidate
    raise TypeError(f"Could not infer backend for options {rpc_backend_options}")


def _validate_rpc_args(
    backend: Any, store: Any, name: Any, rank: Any, world_size: Any, rpc_backend_options: Any
) -> None:
    for argument, expected in (
        (backend, backend_registry.BackendType),
        (store, Store),
        (name, str),
        (rank, numbers.Integral),
        (world_size, (numbers.Integral, type(None))),
        (rpc_backend_options, RpcBackendOptions),
    ):
        if not isinstance(argument, expected):
            raise RuntimeError(f"Argument {argument} must be of type {expected} but got type {type(argument)}")


def _init_rpc_backend(
    backend: Any = backend_registry.BackendType.TENSORPIPE,
    store: Any = None,
    name: Any = None,
    rank: int = -1,
    world_size: int | None = None,
    rpc_backend_options: Any = None,
) -> None:
    _validate_rpc_args(backend, store, name, rank, world_size, rpc_backend_options)
    if _is_current_rpc_agent_set():
        raise RuntimeError("RPC is already initialized")
    agent = backend_registry.init_backend(
        backend, store=store, name=name, rank=rank, world_size=world_size, rpc_backend_options=rpc_backend_options
    )
    api._init_rpc_states(agent)


@api._require_initialized
def _get_debug_info() -> dict[str, Any]:
    info: dict[str, Any] = {
        **_rref_context_get_debug_info(),
        **_get_current_rpc_agent().get_debug_info(),
        **dist_autograd._get_debug_info(),
    }
    return info


def __getattr__(name: str) -> Any:
    if name == "BackendType":  # a new class after each register_backend
        return backend_registry.BackendType
    raise AttributeError(f"module 'torch.distributed.rpc' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), "BackendType"})


keep_uncompiled(__name__)
