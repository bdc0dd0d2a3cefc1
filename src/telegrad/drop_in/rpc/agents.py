"""The agent with torch's interface, and the current agent of the process."""

from __future__ import annotations

import dataclasses
import sys
import threading
import traceback
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch

from telegrad.agent.agent import Agent
from telegrad.default_agent import set_default_agent
from telegrad.drop_in.data_parallel import is_averaged
from telegrad.drop_in.rpc.options import _TensorPipeRpcBackendOptionsBase
from telegrad.drop_in.rpc.torch_errors import NO_AGENT, to_torch_error, worker_text
from telegrad.errors import UnknownWorker
from telegrad.worker_info import WorkerInfo

_POLL_INTERVAL = 0.01


class RpcAgent(ABC):
    """Interface of the agent of a process."""

    @abstractmethod
    def get_worker_info(self, worker: str | int | None = None) -> WorkerInfo:
        """Return the worker with that name or id, or this one if none is given."""

    @abstractmethod
    def get_worker_infos(self) -> list[WorkerInfo]:
        """Return all workers."""

    @abstractmethod
    def get_metrics(self) -> dict[str, str]:
        """Return how many threads and calls there are."""

    @abstractmethod
    def join(self, shutdown: bool = False, timeout: float = 0) -> None:
        """Wait until no worker has calls in progress. With `shutdown`, leave then."""

    @abstractmethod
    def sync(self) -> None:
        """Wait until all workers have called this."""

    @abstractmethod
    def shutdown(self) -> None:
        """Leave immediately."""

    @abstractmethod
    def _get_device_map(self, worker: WorkerInfo) -> dict[Any, Any]:
        """Return the map from devices of this worker to devices of `worker`."""

    def get_debug_info(self) -> dict[str, str]:
        """Return the metrics. Subclasses may add to them."""
        return self.get_metrics()


class TensorPipeAgent(RpcAgent):
    """Telegrad's agent under the name of torch's. `init_rpc` creates it."""

    store: Any
    is_static_group: bool

    def __init__(self, agent: Agent, store: Any, options: _TensorPipeRpcBackendOptionsBase, *, static: bool) -> None:
        self.agent = agent
        self.store = store
        self.is_static_group = static
        self._options = options
        self.leaks: list[str] = []
        """The RRefs to values of this worker that others still held when it left."""
        agent.server.on_failure = self._print_failure
        messaging = agent.autograd.messaging
        messaging.accumulate_hooks = True
        messaging.inner_into_grad = True
        messaging.accumulate_through.copies_shared = True
        messaging.accumulate_through.finished_later = is_averaged

    def get_worker_info(self, worker: str | int | None = None) -> WorkerInfo:
        """Return the worker with that name or id, or this one if none is given."""
        if worker is None:
            record = self.agent.me
        else:
            try:
                record = self.agent.peers.find(worker).record
            except UnknownWorker as error:
                raise to_torch_error(error, self.agent) from error
        return WorkerInfo(record.name, record.id)

    def get_worker_infos(self) -> list[WorkerInfo]:
        """Return all workers."""
        peers = self.agent.peers.all()
        if not self.is_static_group:
            peers = [peer for peer in peers if not peer.gone]
        return [WorkerInfo(peer.record.name, peer.record.id) for peer in peers]

    def get_metrics(self) -> dict[str, str]:
        """Return how many threads and calls there are."""
        agent = self.agent
        channels = [channel for peer in agent.peers.all() for channel in peer.channels()]
        served = list(agent.server.active.values())
        threads = agent.settings.running
        counts = {
            "thread_pool_size": threads,
            "num_idle_threads": max(0, threads - agent.executor.running_count()),
            "client_active_calls": sum(len(channel.calls) for channel in channels),
            "server_active_calls": len(served),
            "server_active_async_calls": sum(one.deferred for one in served),
        }
        return {f"agent.{name}": str(count) for name, count in counts.items()}

    def join(self, shutdown: bool = False, timeout: float = 0) -> None:
        """Wait until no worker has calls in progress. With `shutdown`, leave then.

        In a dynamic group, wait for this worker's calls only.
        """
        if not self.is_static_group:
            deadline = self.agent.runtime.now() + timeout if timeout else None
            while self.agent.activity() and (deadline is None or self.agent.runtime.now() < deadline):
                self.agent.executor.wait(self.agent.runtime.event(), self.agent.runtime.now() + _POLL_INTERVAL)
            if shutdown:
                self.agent.shutdown(graceful=False)
        elif shutdown:
            self.agent.shutdown(timeout=timeout)
        else:
            self.agent.gather(timeout=timeout, what="join()")

    def sync(self) -> None:
        """Wait until all workers have called this."""
        self.agent.gather(timeout=0.0, what="sync()")

    def shutdown(self) -> None:
        """Leave immediately."""
        self.agent.shutdown(graceful=False)

    def set_timeout(self, seconds: float) -> None:
        """Set the default timeout of calls made from now on."""
        self.agent.settings = dataclasses.replace(self.agent.settings, rpc_timeout=float(seconds))

    def _get_backend_options(self) -> _TensorPipeRpcBackendOptionsBase:
        return self._options

    def _get_device_map(self, worker: WorkerInfo) -> dict[Any, Any]:
        return self._options.device_maps.get(worker.name, {})

    def _update_group_membership(
        self,
        worker_info: WorkerInfo,
        my_devices: Sequence[torch.device],
        reverse_device_map: Mapping[str, Mapping[torch.device, torch.device]],
        is_join: bool,
    ) -> NoReturn:
        """Raise an error: membership changes only through `init_rpc` and `shutdown`."""
        raise RuntimeError(
            f"worker {self.agent.me.name!r} does not accept notices that worker {worker_info.name!r} joins or leaves. "
            "Call init_rpc or shutdown on that worker: the others learn about it from its connections"
        )

    def _print_failure(self, error: BaseException) -> None:
        """Print the error of a function on the worker where it ran, as torch does."""
        if isinstance(error, Exception):
            worker = worker_text(self.agent, self.agent.me.name)
            trace = error.__traceback__.tb_next if error.__traceback__ is not None else None
            text = "".join(traceback.format_exception(type(error), error, trace))
            print(f"On {worker}:\n{error!r}\n{text}", file=sys.stderr)  # noqa: T201 - torch's behaviour


_lock = threading.Lock()  # protects _current
_current: Any = None


def is_current_agent_set() -> bool:
    """Return whether this process has an agent."""
    return _current is not None


def get_current_agent() -> Any:
    """Return the agent of this process."""
    agent = _current
    if agent is None:
        raise RuntimeError(NO_AGENT)
    return agent


def set_current_agent(agent: Any) -> None:
    """Make `agent` the agent of this process."""
    global _current
    with _lock:
        _current = agent


def reset_current_agent() -> None:
    """Leave this process without an agent."""
    set_current_agent(None)
    set_default_agent(None)
