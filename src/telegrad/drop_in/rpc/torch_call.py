"""Converts the arguments of a call from torch's form to that of telegrad's agent."""

from __future__ import annotations

from typing import Any

import torch

from telegrad.agent.agent import Agent
from telegrad.drop_in.rpc.constants import UNSET_RPC_TIMEOUT
from telegrad.drop_in.rpc.internal import PythonUDF, _internal_rpc_pickler, run_pickled
from telegrad.drop_in.rpc.torch_errors import to_torch_error
from telegrad.errors import UnknownWorker
from telegrad.worker_info import WorkerInfo


class TorchCall:
    """A call with torch's arguments, checked and converted for telegrad's agent."""

    __slots__ = ("agent", "args", "builtin", "function", "kwargs", "timeout", "to")

    def __init__(self, agent: Agent, to: Any, func: Any, args: Any, kwargs: Any, timeout: float, pickler: Any) -> None:
        if not callable(func):
            raise TypeError("function should be callable.")
        self.agent = agent
        self.to = to.id if isinstance(to, WorkerInfo) else _id_of(self.agent, to)
        self.timeout = None if timeout == UNSET_RPC_TIMEOUT else timeout
        self.builtin = torch.jit._builtins._find_builtin(func) is not None  # type: ignore[no-untyped-call]
        self.function, self.args, self.kwargs = func, tuple(args or ()), kwargs or {}
        if isinstance(func, torch.jit.ScriptFunction):
            _check_schema(func, self.args)
        if pickler is not _internal_rpc_pickler and not self.builtin:
            data = pickler.serialize(PythonUDF(func, self.args, self.kwargs))
            self.function, self.args, self.kwargs = run_pickled, data, {}


def _id_of(agent: Agent, to: Any) -> int:
    if not isinstance(to, str | int):
        raise ValueError(f"Cannot get WorkerInfo from name {to}")
    try:
        return agent.peers.find(to).record.id
    except UnknownWorker as error:
        raise to_torch_error(error, agent) from error


def _check_schema(func: Any, args: tuple[Any, ...]) -> None:
    """Raise an error for too many arguments, which TorchScript reports to the caller before the call."""
    expected = len(func.schema.arguments)
    if len(args) > expected:
        raise RuntimeError(
            f"{func.schema.name}() expected at most {expected} argument(s) but received {len(args)} argument(s). "
            f"Declaration: {func.schema}"
        )
