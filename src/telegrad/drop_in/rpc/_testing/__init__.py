"""torch.distributed.rpc._testing on telegrad: importing it registers the backend ``FAULTY_TENSORPIPE``."""

from __future__ import annotations

from telegrad.drop_in.rpc._testing import faulty_agent_backend_registry
from telegrad.drop_in.rpc.faulty_agent import FaultyTensorPipeAgent, FaultyTensorPipeRpcBackendOptions

__all__ = [
    "FaultyTensorPipeAgent",
    "FaultyTensorPipeRpcBackendOptions",
    "faulty_agent_backend_registry",
    "is_available",
]


def is_available() -> bool:
    """Return whether the agent with fault injection is available: always True."""
    return True
