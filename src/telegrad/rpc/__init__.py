"""Calls between workers, with the API of torch.distributed.rpc."""

from telegrad.default_agent import default_agent, set_default_agent
from telegrad.futures import Future
from telegrad.options import Options
from telegrad.protocol.peer_limits import PeerLimits
from telegrad.rpc import functions
from telegrad.rpc.api import (
    all_gather,
    barrier,
    current_call,
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
    shutdown,
    traffic,
)
from telegrad.rpc.broadcasting import broadcast
from telegrad.rpc.calling_all import call_all
from telegrad.rpc.exposing import expose
from telegrad.rpc.idempotence import idempotent
from telegrad.rpc.membership import on_worker_lost, wait_for_worker, workers
from telegrad.rpc.signals import wrap_signal_handler
from telegrad.rref.handle import RRef
from telegrad.worker_devices import devices
from telegrad.worker_info import Traffic, WorkerInfo, WorkerStatus

__all__ = [
    "Future",
    "Options",
    "PeerLimits",
    "RRef",
    "Traffic",
    "WorkerInfo",
    "WorkerStatus",
    "all_gather",
    "barrier",
    "broadcast",
    "call_all",
    "current_call",
    "default_agent",
    "devices",
    "expose",
    "functions",
    "get_rpc_timeout",
    "get_worker_info",
    "get_worker_infos",
    "idempotent",
    "init_rpc",
    "is_available",
    "on_worker_lost",
    "register",
    "remote",
    "rpc_async",
    "rpc_sync",
    "session",
    "set_default_agent",
    "shutdown",
    "traffic",
    "wait_for_worker",
    "workers",
    "wrap_signal_handler",
]


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
