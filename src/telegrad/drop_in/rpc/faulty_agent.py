"""An agent with injected failures and delays of messages, as in torch._C._distributed_rpc_testing.

The faults are those of `telegrad.testing.faults`, selected by torch's message names. Torch resends messages that may be
lost. Telegrad's sessions do the same over a new connection, so those faults need tcp.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from telegrad.agent.agent import Agent
from telegrad.calls.service_names import FETCH, GATHER, METHOD
from telegrad.drop_in.rpc.agents import TensorPipeAgent
from telegrad.drop_in.rpc.options import _TensorPipeRpcBackendOptionsBase
from telegrad.testing.faults import Fate, inject
from telegrad.wire import function_names
from telegrad.wire.messages import (
    CleanupAutogradContextReq,
    Head,
    PropagateGradientsReq,
    Request,
    RRefBackwardReq,
    RRefChildAccept,
    RRefForkRequest,
    RRefUserDelete,
)
from telegrad.wire.torchscript import PREFIX

_ONE_WAY: dict[type, str] = {
    RRefForkRequest: "RREF_FORK_REQUEST",
    RRefChildAccept: "RREF_CHILD_ACCEPT",
    RRefUserDelete: "RREF_USER_DELETE",
    RRefBackwardReq: "RREF_BACKWARD_REQ",
    CleanupAutogradContextReq: "CLEANUP_AUTOGRAD_CONTEXT_REQ",
    PropagateGradientsReq: "BACKWARD_AUTOGRAD_REQ",
}
_FETCHES = ("SCRIPT_RREF_FETCH_CALL", "PYTHON_RREF_FETCH_CALL")  # telegrad does not distinguish them
_CALLS = ("SCRIPT_CALL", "PYTHON_CALL", "SCRIPT_REMOTE_CALL", "PYTHON_REMOTE_CALL", "FORWARD_AUTOGRAD_REQ")
_KNOWN = {*_ONE_WAY.values(), *_FETCHES, *_CALLS}


class FaultyTensorPipeRpcBackendOptions(_TensorPipeRpcBackendOptionsBase):
    """Which messages fail, how often each fails, and which are delayed by how many seconds."""

    messages_to_fail: list[str]
    messages_to_delay: dict[str, float]
    num_fail_sends: int

    def __init__(
        self,
        num_worker_threads: int,
        rpc_timeout: float,
        init_method: str,
        messages_to_fail: Sequence[str],
        messages_to_delay: Mapping[str, float],
        num_fail_sends: int = 0,
    ) -> None:
        super().__init__(num_worker_threads, rpc_timeout=rpc_timeout, init_method=init_method)
        unknown = sorted({*messages_to_fail, *messages_to_delay} - _KNOWN)
        if unknown:
            raise ValueError(
                f"telegrad has no messages {', '.join(unknown)} that could fail or be delayed; choose from "
                f"{', '.join(sorted(_KNOWN))}"
            )
        self.messages_to_fail = list(messages_to_fail)
        self.messages_to_delay = dict(messages_to_delay)
        self.num_fail_sends = num_fail_sends

    def fate(self, head: Head) -> Fate | None:
        """Return what happens to a message."""
        names = _names_of(head)
        if self.num_fail_sends and not set(names).isdisjoint(self.messages_to_fail):
            return Fate(fails=self.num_fail_sends)
        delay = max((self.messages_to_delay.get(name, 0.0) for name in names), default=0.0)
        return Fate(delay=delay) if delay else None


class FaultyTensorPipeAgent(TensorPipeAgent):
    """Telegrad's agent with fault injection."""

    def __init__(self, agent: Agent, store: Any, options: FaultyTensorPipeRpcBackendOptions, *, static: bool) -> None:
        inject(agent, options.fate)
        super().__init__(agent, store, options, static=static)


def _names_of(head: Head) -> tuple[str, ...]:
    """Return torch's names for such a message."""
    if not isinstance(head, Request):
        name = _ONE_WAY.get(type(head))
        return () if name is None else (name,)
    if head.function == GATHER:
        return ()  # telegrad's own collectives, which torch has no messages for
    if head.autograd is not None:
        return ("FORWARD_AUTOGRAD_REQ",)
    if head.function == FETCH:
        return _FETCHES
    kind = "SCRIPT" if _is_script(head.function) else "PYTHON"
    return (f"{kind}_CALL" if head.creation is None else f"{kind}_REMOTE_CALL",)


def _is_script(function: str) -> bool:
    """Return whether it is a TorchScript function or a torch operator."""
    if not function or function == METHOD:
        return False
    if function.startswith(PREFIX):
        return True
    if function.startswith("@"):
        return False
    found = function_names.resolve_function(function)
    return torch.jit._builtins._find_builtin(found) is not None  # type: ignore[no-untyped-call]
