"""Registers the backend ``FAULTY_TENSORPIPE``: telegrad's agent with injected failures and delays of messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from telegrad.drop_in.rpc import backend_registry
from telegrad.drop_in.rpc.agents import TensorPipeAgent
from telegrad.drop_in.rpc.constants import DEFAULT_NUM_WORKER_THREADS
from telegrad.drop_in.rpc.faulty_agent import FaultyTensorPipeAgent, FaultyTensorPipeRpcBackendOptions


def _faulty_tensorpipe_construct_rpc_backend_options_handler(
    rpc_timeout: float,
    init_method: str,
    num_worker_threads: int = DEFAULT_NUM_WORKER_THREADS,
    messages_to_fail: Sequence[str] = (),
    messages_to_delay: Mapping[str, float] | None = None,
    num_fail_sends: int = 0,
    **kwargs: Any,
) -> FaultyTensorPipeRpcBackendOptions:
    return FaultyTensorPipeRpcBackendOptions(
        num_worker_threads, rpc_timeout, init_method, messages_to_fail, messages_to_delay or {}, num_fail_sends
    )


def _faulty_tensorpipe_init_backend_handler(
    store: Any, name: str, rank: int, world_size: int | None, rpc_backend_options: Any
) -> TensorPipeAgent:
    if not isinstance(rpc_backend_options, FaultyTensorPipeRpcBackendOptions):
        raise TypeError(f"`rpc_backend_options` must be a `FaultyTensorPipeRpcBackendOptions`. {rpc_backend_options}")
    return backend_registry.start(FaultyTensorPipeAgent, store, name, rank, world_size, rpc_backend_options)


backend_registry.register_backend(
    "FAULTY_TENSORPIPE",
    _faulty_tensorpipe_construct_rpc_backend_options_handler,
    _faulty_tensorpipe_init_backend_handler,
)
