"""The registry of backends, as in torch.distributed.rpc.backend_registry.

``BackendType.TENSORPIPE`` is telegrad's agent. Programs may register more.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from torch.distributed import Store  # type: ignore[attr-defined]  # public, but not in __all__

from telegrad.agent.agent import Agent
from telegrad.drop_in.rpc import api
from telegrad.drop_in.rpc._utils import _group_membership_management, _update_group_membership
from telegrad.drop_in.rpc.agents import TensorPipeAgent, get_current_agent, reset_current_agent, set_current_agent
from telegrad.drop_in.rpc.constants import (
    DEFAULT_INIT_METHOD,
    DEFAULT_NUM_WORKER_THREADS,
    DEFAULT_RPC_TIMEOUT_SEC,
)
from telegrad.drop_in.rpc.device_maps import check_device_maps, device_config, use_device_maps
from telegrad.drop_in.rpc.dynamic_group import check_maps_of_members
from telegrad.drop_in.rpc.options import TensorPipeRpcBackendOptions, frozen
from telegrad.drop_in.rpc.rref import use_torch_rrefs
from telegrad.errors import DuplicateWorker
from telegrad.rendezvous_search import MixedGroup
from telegrad.rendezvous_store import store_address
from telegrad.rpc import Options, default_agent, shutdown
from telegrad.rpc.api import join
from telegrad.rpc.group_rendezvous import Rendezvous

__all__ = [
    "BackendType",
    "BackendValue",
    "backend_registered",
    "construct_rpc_backend_options",
    "init_backend",
    "register_backend",
]


class BackendValue(NamedTuple):
    """The functions that create the options of a backend and start it."""

    construct_rpc_backend_options_handler: Callable[..., Any]
    init_backend_handler: Callable[..., Any]


def _backend_type_repr(self: enum.Enum) -> str:
    return f"BackendType.{self.name}"


_make_enum: Any = enum.Enum
BackendType: Any = _make_enum("BackendType", {})


def backend_registered(backend_name: str) -> bool:
    """Return whether there is a backend with that name."""
    return backend_name in BackendType.__members__


def register_backend(
    backend_name: str,
    construct_rpc_backend_options_handler: Callable[..., Any],
    init_backend_handler: Callable[..., Any],
) -> Any:
    """Add a backend and return its member of `BackendType`, which becomes a new class."""
    global BackendType
    if backend_registered(backend_name):
        raise RuntimeError(f"RPC backend {backend_name}: already registered")
    members = {member.name: member.value for member in BackendType}
    members[backend_name] = BackendValue(construct_rpc_backend_options_handler, init_backend_handler)
    BackendType = _make_enum("BackendType", members)
    BackendType.__repr__ = _backend_type_repr
    return BackendType[backend_name]


def construct_rpc_backend_options(
    backend: Any,
    rpc_timeout: float = DEFAULT_RPC_TIMEOUT_SEC,
    init_method: str = DEFAULT_INIT_METHOD,
    **kwargs: Any,
) -> Any:
    """Return options for a backend."""
    return backend.value.construct_rpc_backend_options_handler(rpc_timeout, init_method, **kwargs)


def init_backend(backend: Any, *args: Any, **kwargs: Any) -> Any:
    """Start a backend and return its agent."""
    return backend.value.init_backend_handler(*args, **kwargs)


# -- the backend of telegrad ------------------------------------------------------------------------------------


def _tensorpipe_construct_rpc_backend_options_handler(
    rpc_timeout: float,
    init_method: str,
    num_worker_threads: int = DEFAULT_NUM_WORKER_THREADS,
    _transports: Any = None,
    _channels: Any = None,
    **kwargs: Any,
) -> TensorPipeRpcBackendOptions:
    return TensorPipeRpcBackendOptions(
        rpc_timeout=rpc_timeout,
        init_method=init_method,
        num_worker_threads=num_worker_threads,
        _transports=_transports,
        _channels=_channels,
    )


def _tensorpipe_init_backend_handler(
    store: Any, name: str, rank: int, world_size: int | None, rpc_backend_options: Any
) -> TensorPipeAgent:
    if not isinstance(rpc_backend_options, TensorPipeRpcBackendOptions):
        raise TypeError(f"`rpc_backend_options` must be a `TensorPipeRpcBackendOptions`. {rpc_backend_options}")
    return start(TensorPipeAgent, store, name, rank, world_size, rpc_backend_options)


def start(
    cls: type[TensorPipeAgent], store: Any, name: str, rank: int, world_size: int | None, rpc_backend_options: Any
) -> TensorPipeAgent:
    """Join the group with an agent of class `cls`. Without a world size, the group is dynamic."""
    if not isinstance(store, Store):
        raise TypeError(f"`store` must be a c10d::Store. {store}")
    given = frozen(rpc_backend_options)
    options = Options(
        rpc_timeout=rpc_backend_options.rpc_timeout, num_worker_threads=rpc_backend_options.num_worker_threads
    )

    if options.accepted() != "any":
        raise ValueError(
            "the drop-in cannot run in registered mode: programs written for torch.distributed.rpc send functions and "
            "pickled values. Unset TELEGRAD_ACCEPT, or use telegrad's own API and @telegrad.expose"
        )

    def prepare(agent: Agent) -> None:
        use_torch_rrefs(agent)
        use_device_maps(agent, given)
        agent.client.carries_autocast = False  # as in torch, where each worker has its own autocast state
        # Others may call this worker as soon as it serves, and the functions they call may make calls.
        set_current_agent(cls(agent, store, given, static=bool(world_size)))

    address = store_address(rpc_backend_options.init_method)
    rendezvous = Rendezvous(
        store, rank, world_size, options.init_timeout, prefix="group", address=address, one_kind=True
    )
    try:
        join(name, rank, rendezvous, options, prepare)
        if world_size:
            worker = default_agent()
            check_device_maps(worker.gather(device_config(), timeout=worker.settings.rpc_timeout, what="init_rpc()"))
        else:
            check_maps_of_members(default_agent())
    except MixedGroup as error:
        raise RuntimeError(
            "RPC group mixes statically and dynamically initialized members which is not supported."
        ) from error
    except DuplicateWorker as error:
        raise DuplicateWorker(f"RPC worker name {name} is not unique: {error}") from error
    except BaseException:
        shutdown(graceful=False)
        reset_current_agent()
        raise
    agent: TensorPipeAgent = get_current_agent()
    api._init_rpc_states(agent)
    return agent


register_backend("TENSORPIPE", _tensorpipe_construct_rpc_backend_options_handler, _tensorpipe_init_backend_handler)
