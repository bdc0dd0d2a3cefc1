"""A group of three workers in one process; the test acts as a. Modules on worker b."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from tests.support.remote_nets import Net, Parent

from telegrad.agent.agent import Agent
from telegrad.default_agent import acting_as
from telegrad.nn import RemoteModule
from telegrad.testing.group import local_group


@pytest.fixture
def group() -> Iterator[dict[str, Agent]]:
    with local_group(["a", "b", "c"]) as agents, acting_as(agents["a"]):
        yield agents


@pytest.fixture
def net() -> RemoteModule:
    return RemoteModule("b", Net)


@pytest.fixture
def pair(net: RemoteModule) -> tuple[Parent, Parent]:
    torch.manual_seed(1)
    remote = Parent(net)
    here = Parent(Net())
    here.load_state_dict(remote.state_dict())
    return remote, here
