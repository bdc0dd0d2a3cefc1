"""Groups of workers in one process, in which the test acts as worker a."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]  # public, but not in __all__

from telegrad.agent.agent import Agent
from telegrad.default_agent import acting_as, set_default_agent
from telegrad.drop_in import rpc
from telegrad.drop_in.rpc.agents import TensorPipeAgent, reset_current_agent, set_current_agent
from telegrad.drop_in.rpc.rref import use_torch_rrefs
from telegrad.testing.faults import Fate, inject
from telegrad.testing.group import local_group
from telegrad.wire.messages import Request


@pytest.fixture
def group() -> Iterator[dict[str, Agent]]:
    with local_group(["a", "b", "c"]) as agents, acting_as(agents["a"]):
        yield agents


def is_call_of(head: Any, name: str) -> bool:
    return isinstance(head, Request) and head.function.endswith(name)


@pytest.fixture
def agents() -> Iterator[dict[str, Agent]]:
    """Two workers under the drop-in. Calls of `neg` by worker a are never sent."""
    with local_group(["a", "b"]) as group:
        for agent in group.values():
            use_torch_rrefs(agent)
        inject(group["a"], lambda head: Fate(fails=1) if is_call_of(head, ":neg") else None)
        options = rpc.TensorPipeRpcBackendOptions()
        set_current_agent(TensorPipeAgent(group["a"], HashStore(), options, static=True))
        set_default_agent(group["a"])
        try:
            with acting_as(group["a"]):
                yield group
        finally:
            reset_current_agent()
