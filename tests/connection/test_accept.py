"""Pending connections are bounded, members always get through, and the poller never spins."""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from telegrad.connection import accept
from telegrad.connection.accept import PendingConnections
from telegrad.connection.group_keys import derive_keys
from telegrad.connection.worker_record import WorkerRecord
from telegrad.execution.timers import Timer
from telegrad.settings import AgentSettings
from telegrad.transport.base import Link, Listener, Ready
from telegrad.transport.memory import MemoryNetwork, MemoryTransport

LIMIT = 3


class FakeAgent:
    """An agent with only what accepting needs. Its clock stands still until the test moves it."""

    def __init__(self) -> None:
        self.me = WorkerRecord("a", 0, 1, ())
        self.keys = derive_keys(b"x" * 32)
        self.settings = AgentSettings(connect_timeout=30.0)
        self.runtime: Any = self
        self.executor: Any = SimpleNamespace(timers=self)
        self.time = 0.0
        self.set_timers: list[Timer] = []
        self.transport = MemoryTransport(MemoryNetwork())
        self.poller = self.transport.poller()
        peers: Any = SimpleNamespace(check=None, resume=None)  # no handshake succeeds here
        self.pending = PendingConnections(self, peers)
        self.listener = self.transport.listen("memory://a")
        self.pending.watch(self.listener)

    def now(self) -> float:
        return self.time

    def random_bits(self, count: int) -> int:
        return 1

    def at(self, when: float, action: Callable[[], None]) -> Timer:
        self.set_timers.append(Timer(when, action))
        return self.set_timers[-1]

    def cancel(self, timer: Timer) -> None:
        timer.action = None

    def channel_lost(self, channel: object, reason: str) -> None:
        raise AssertionError(reason)

    def connect(self) -> Link:
        return self.transport.connect("memory://a", 0.0)

    def poll(self) -> bool:
        """Poll once. Returns whether the poller reported the listener."""
        reported = False
        for item, ready in self.poller.wait(0.0):
            reported = reported or isinstance(item, Listener)
            item.owner.on_ready(ready)
        return reported

    def advance(self, seconds: float) -> None:
        self.time += seconds
        for timer in list(self.set_timers):
            if timer.action is not None and timer.when <= self.time:
                action, timer.action = timer.action, None
                action()


@pytest.fixture
def agent(monkeypatch: pytest.MonkeyPatch) -> FakeAgent:
    monkeypatch.setattr(accept, "MAX_PENDING", LIMIT)
    return FakeAgent()


def test_pending_connections_are_bounded_and_the_poller_does_not_spin(agent: FakeAgent) -> None:
    links = [agent.connect() for _ in range(LIMIT + 2)]
    assert agent.poll()
    assert len(agent.pending.all()) == LIMIT
    assert not agent.poll(), "the listener has a backlog, but there is no room"
    assert len(links) == LIMIT + 2


def test_a_waiting_connection_is_accepted_as_soon_as_another_leaves(agent: FakeAgent) -> None:
    links = [agent.connect() for _ in range(LIMIT + 1)]
    agent.poll()
    links[0].close()
    agent.poll()
    assert len(agent.pending.all()) == LIMIT - 1
    assert agent.poll()
    assert len(agent.pending.all()) == LIMIT


def test_the_oldest_connection_is_evicted_after_a_second(agent: FakeAgent, caplog: pytest.LogCaptureFixture) -> None:
    links = [agent.connect() for _ in range(LIMIT)]
    agent.poll()
    agent.advance(0.5)
    links.append(agent.connect())
    agent.poll()
    assert not links[0].wait(0.0)
    agent.advance(0.5)
    with caplog.at_level(logging.WARNING, "telegrad"):
        assert agent.poll()
    assert links[0].wait(0.0) == Ready.READ, "it was evicted"
    assert "too many connections" in caplog.text
    assert len(agent.pending.all()) == LIMIT
    assert [connection.accepted_at for connection in agent.pending.all()] == [0.0] * (LIMIT - 1) + [1.0]


def test_accepting_pauses_without_file_descriptors_and_the_poller_does_not_spin(
    agent: FakeAgent, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    accept = agent.listener.accept
    link = agent.connect()

    def out_of_files() -> Link | None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(agent.listener, "accept", out_of_files)
    with caplog.at_level(logging.WARNING, "telegrad"):
        assert agent.poll()
    assert "Too many open files" in caplog.text
    assert "ulimit" in caplog.text
    assert not agent.poll()
    monkeypatch.setattr(agent.listener, "accept", accept)
    agent.advance(1.0)
    assert agent.poll()
    assert len(agent.pending.all()) == 1
    link.close()


def test_a_connection_after_close_is_refused(agent: FakeAgent) -> None:
    agent.pending.close()
    link = agent.connect()
    agent.poll()
    assert link.wait(0.0) == Ready.READ
    assert not agent.pending.all()
