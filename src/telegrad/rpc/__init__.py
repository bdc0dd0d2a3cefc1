"""Calls between workers, in the terms of torch.distributed.rpc."""

from telegrad.rpc import functions
from telegrad.rpc.api import (
    all_gather,
    barrier,
    current_call,
    default_agent,
    get_rpc_timeout,
    get_worker_info,
    get_worker_infos,
    init_rpc,
    is_available,
    register,
    remote,
    rpc_async,
    rpc_sync,
    session,
    set_default_agent,
    shutdown,
    traffic,
)
from telegrad.rpc.futures import Future
from telegrad.rpc.options import Options
from telegrad.rpc.rref import RRef
from telegrad.rpc.signals import wrap_signal_handler
from telegrad.rpc.worker_info import Traffic, WorkerInfo

__all__ = [
    "Future",
    "Options",
    "RRef",
    "Traffic",
    "WorkerInfo",
    "all_gather",
    "barrier",
    "current_call",
    "default_agent",
    "functions",
    "get_rpc_timeout",
    "get_worker_info",
    "get_worker_infos",
    "init_rpc",
    "is_available",
    "register",
    "remote",
    "rpc_async",
    "rpc_sync",
    "session",
    "set_default_agent",
    "shutdown",
    "traffic",
    "wrap_signal_handler",
]
