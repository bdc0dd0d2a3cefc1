"""The registry of backends."""

from __future__ import annotations

import pytest
import torch.distributed

from telegrad.drop_in.rpc import backend_registry
from telegrad.drop_in.rpc.agents import TensorPipeAgent
from telegrad.drop_in.rpc.options import TensorPipeRpcBackendOptions


def test_a_backend_can_be_registered_once() -> None:
    before = backend_registry.BackendType
    try:
        member = backend_registry.register_backend("mine", lambda timeout, url: (timeout, url), lambda: "agent")
        assert backend_registry.backend_registered("mine")
        assert backend_registry.construct_rpc_backend_options(member, 1.0, "x") == (1.0, "x")
        assert backend_registry.init_backend(member) == "agent"
        with pytest.raises(RuntimeError, match="RPC backend mine: already registered"):
            backend_registry.register_backend("mine", print, print)
    finally:
        backend_registry.BackendType = before


def test_registered_mode_is_refused_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TELEGRAD_ACCEPT", "registered")
    store = torch.distributed.HashStore()
    with pytest.raises(ValueError, match=r"Unset TELEGRAD_ACCEPT, or use telegrad's own API"):
        backend_registry.start(TensorPipeAgent, store, "a", 0, 1, TensorPipeRpcBackendOptions())
