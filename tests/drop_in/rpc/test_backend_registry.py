"""The registry of backends."""

from __future__ import annotations

import pytest

from telegrad.drop_in.rpc import backend_registry


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
