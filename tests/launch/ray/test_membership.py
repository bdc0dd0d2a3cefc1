"""`telegrad.launch.ray.membership` with a coordinator in this process: joining, joining again, and leaving."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace

import pytest
from tests.support.coordinator_thread import CoordinatorThread

from telegrad import Options, rpc
from telegrad.default_agent import default_agent, process_agent
from telegrad.errors import TelegradError
from telegrad.launch.ray import membership as module
from telegrad.launch.ray.membership import Membership, enter, leave
from telegrad.launch.ray.store import find_store

TOKEN = "0f1e2d3c4b5a69788796a5b4c3d2e1f0"


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[Membership]:
    """The place of the only worker of a group."""
    coordinator = CoordinatorThread()
    monkeypatch.setattr(module, "coordinator_call", lambda handle: handle.call)
    monkeypatch.setattr(module, "report_metrics", lambda agent: None)
    yield Membership("key", "alice", 0, 1, TOKEN, coordinator)
    leave("key", graceful=False)
    coordinator.close()


def test_a_process_joins_once_and_leaves(alone: Membership) -> None:
    before = dict(os.environ)
    assert enter(alone, Options())
    assert rpc.get_worker_info().name == "alice"
    assert not enter(replace(alone, restart=1), Options())
    assert dict(os.environ) == before
    leave("another", graceful=True)
    assert process_agent() is not None
    leave("key", graceful=True)
    assert process_agent() is None
    assert find_store("key") is None
    leave("key", graceful=True)


def test_a_process_that_the_others_have_lost_joins_again_with_a_later_generation(alone: Membership) -> None:
    enter(alone, Options())
    first = default_agent().me
    assert enter(replace(alone, restart=1), Options(), replaces=first.generation)
    second = default_agent().me
    assert second.generation > first.generation
    assert second.incarnation != first.incarnation
    assert not enter(replace(alone, restart=2), Options(), replaces=first.generation)


def test_a_member_of_another_group_is_refused(alone: Membership) -> None:
    enter(alone, Options())
    with pytest.raises(TelegradError, match="it is worker 'alice' of another group"):
        enter(replace(alone, key="other", name="bob"), Options())


def test_the_token_is_not_in_the_repr(alone: Membership) -> None:
    assert TOKEN not in repr(alone)
    options = Options()
    enter(alone, options)
    assert options.token is None
    assert default_agent().local.keys is not None
