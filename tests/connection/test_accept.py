"""Pending connections are bounded, members always get through, and the poller never spins."""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import pytest

from telegrad.connection import accept, pending_connection
from telegrad.connection.accept import PendingConnections
from telegrad.connection.dialer import send_greeting
from telegrad.connection.eviction import CROWDED_TIMES, FLOODED_TIMES, GREETED, MEMBER_TIME, SILENT
from telegrad.connection.group_keys import derive_keys
from telegrad.connection.handshake import NONCE_SIZE, Opener
from telegrad.connection.refusal_log import INTERVAL
from telegrad.connection.worker_record import WorkerRecord
from telegrad.execution.timers import RETRY_DELAY, Timer
from telegrad.settings import AgentSettings
from telegrad.transport.base import Link, Listener, Ready
from telegrad.transport.memory import MemoryListener, MemoryNetwork, MemoryTransport
from telegrad.wire.frames import Frame, Kind

LIMIT = 4


class FakeAgent:
    """An agent with only what accepting needs. Its clock stands still until the test moves it."""

    def __init__(self) -> None:
        self.me = WorkerRecord("a", 0, 1, ("memory://a",))
        self.keys = derive_keys(b"x" * 32)
        self.name = "a"
        self.settings = AgentSettings(connect_timeout=30.0)
        self.runtime: Any = self
        self.executor: Any = SimpleNamespace(timers=self)
        self.time = 0.0
        self.set_timers: list[Timer] = []
        self.transport = MemoryTransport(MemoryNetwork())
        self.poller = self.transport.poller()
        # No handshake succeeds here.
        peers: Any = SimpleNamespace(check=None, resume=None, known_generation=lambda hello: -1)
        self.pending = PendingConnections(self, peers)
        listener = self.transport.listen("memory://a")
        assert isinstance(listener, MemoryListener)
        self.listener = listener
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

    def connect(self, source: str = "") -> Link:
        link = self.transport.connect("memory://a", 0.0)
        if source:
            self.listener.pending[-1].peer = f"{source}:1"
        return link

    def greet(self, link: Link) -> None:
        key, nonce = self.keys.handshake, b"n" * NONCE_SIZE
        opener = Opener(
            WorkerRecord("b", 1, 5, ()),
            self.me,
            key,
            nonce,
            dialled="memory://a",
            attempt=1,
            session=1,
            received=(0, 0),
            fresh=True,
            link=link,
        )
        send_greeting(link, opener.start())

    def poll(self) -> bool:
        """Poll once, and run the timers that are due. Returns whether the poller reported the listener."""
        reported = False
        for item, ready in self.poller.wait(0.0):
            reported = reported or isinstance(item, Listener)
            item.owner.on_ready(ready)
        self.advance(0.0)
        return reported

    def settle(self) -> None:
        """Poll until nothing is ready."""
        while self.poll() or any(timer.action is not None and timer.when <= self.time for timer in self.set_timers):
            pass
        self.poll()

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


def ended(link: Link) -> bool:
    return link.wait(0.0) == Ready.READ


def test_pending_connections_are_bounded_and_the_poller_does_not_spin(agent: FakeAgent) -> None:
    links = [agent.connect() for _ in range(LIMIT + 2)]
    assert agent.poll()
    assert len(agent.pending.all()) == LIMIT
    assert not agent.poll(), "the listener has a backlog, but there is no room"
    assert not any(ended(link) for link in links)


def test_a_waiting_connection_is_accepted_as_soon_as_another_leaves(agent: FakeAgent) -> None:
    links = [agent.connect() for _ in range(LIMIT + 1)]
    agent.poll()
    links[0].close()
    agent.poll()
    assert agent.poll()
    assert len(agent.pending.all()) == LIMIT
    assert not any(ended(link) for link in links[1:])


def test_the_oldest_silent_connection_makes_room_after_a_moment(
    agent: FakeAgent, caplog: pytest.LogCaptureFixture
) -> None:
    links = [agent.connect() for _ in range(LIMIT + 1)]
    agent.poll()
    assert not ended(links[0])
    with caplog.at_level(logging.WARNING, "telegrad"):
        agent.advance(accept._FULL_PAUSE)
        agent.poll()
    assert [ended(link) for link in links] == [True] + [False] * LIMIT
    assert "too many connections" in caplog.text
    assert len(agent.pending.all()) == LIMIT


def test_a_connection_with_a_valid_hello_outlives_any_number_of_strangers(agent: FakeAgent) -> None:
    member = agent.connect()
    agent.greet(member)
    agent.settle()
    assert [frame.kind for frame in member.receive()] == [Kind.HANDSHAKE], "it got its challenge"
    strangers = []
    for _ in range(20 * LIMIT):
        agent.advance(FLOODED_TIMES[SILENT])
        strangers.append(agent.connect())
        agent.settle()
    assert not ended(member)
    assert sum(ended(stranger) for stranger in strangers) == len(strangers) - (LIMIT - 1)


def test_a_connection_with_a_valid_preamble_outlives_strangers_but_not_its_time(agent: FakeAgent) -> None:
    member = agent.connect()
    agent.settle()
    (connection,) = agent.pending.all()
    connection.link.has_preamble = True
    connection.on_ready(Ready.READ)
    agent.settle()
    assert connection.stage == GREETED
    for _ in range(5 * LIMIT):
        agent.advance(FLOODED_TIMES[SILENT])
        agent.connect()
        agent.settle()
    assert not ended(member)
    agent.advance(agent.settings.connect_timeout)
    assert ended(member), "a preamble is no authentication"


def test_connections_with_a_valid_hello_make_room_for_each_other_after_a_second(agent: FakeAgent) -> None:
    links = [agent.connect() for _ in range(LIMIT)]
    for link in links:
        agent.greet(link)
    agent.settle()
    for link in links:
        list(link.receive())
    links.append(agent.connect())
    agent.advance(MEMBER_TIME - 0.1)
    agent.settle()
    assert not any(ended(link) for link in links)
    agent.advance(0.1)
    agent.settle()
    assert [ended(link) for link in links] == [True] + [False] * LIMIT


def test_a_source_that_holds_most_places_loses_its_connection_and_not_a_lone_one(agent: FakeAgent) -> None:
    lone = agent.connect("10.0.0.2")
    agent.settle()
    flood = [agent.connect("10.0.0.1") for _ in range(3 * LIMIT)]
    for _ in flood:
        agent.advance(FLOODED_TIMES[SILENT])
        agent.settle()
    assert not ended(lone)
    assert sum(ended(link) for link in flood) == len(flood) - (LIMIT - 1)


def test_connections_from_many_sources_have_more_time(agent: FakeAgent) -> None:
    links = [agent.connect(f"10.0.0.{number}") for number in range(LIMIT + 1)]
    agent.settle()
    agent.advance(FLOODED_TIMES[SILENT])
    agent.settle()
    assert not any(ended(link) for link in links)
    agent.advance(CROWDED_TIMES[SILENT])
    agent.settle()
    assert sum(ended(link) for link in links) == 1


def test_a_round_accepts_and_reads_only_a_batch(agent: FakeAgent, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accept, "MAX_PENDING", 1000)
    links = [agent.connect() for _ in range(100)]
    assert agent.poll()
    assert len(agent.pending.all()) == accept._BATCH
    for link in links:
        agent.greet(link)
    agent.settle()
    assert len(agent.pending.all()) == 100
    assert [len(list(link.receive())) for link in links] == [1] * 100, "each got its challenge in the end"


def test_a_connection_without_proof_is_closed_in_time(agent: FakeAgent, caplog: pytest.LogCaptureFixture) -> None:
    first = agent.connect()
    agent.settle()
    agent.advance(20.0)
    second = agent.connect()
    agent.settle()
    with caplog.at_level(logging.WARNING, "telegrad"):
        agent.advance(10.0)
    assert (ended(first), ended(second)) == (True, False)
    assert "no proof within 30 s" in caplog.text
    agent.advance(20.0)
    assert ended(second)
    assert not agent.pending.all()


def test_without_file_descriptors_a_stranger_is_evicted_for_the_next_connection(
    agent: FakeAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    accept_one = agent.listener.accept
    stranger, member = agent.connect(), agent.connect()

    def only_one_descriptor() -> Link | None:
        if agent.pending.all():
            raise OSError(errno.EMFILE, "Too many open files")
        return accept_one()

    monkeypatch.setattr(agent.listener, "accept", only_one_descriptor)
    agent.poll()
    assert not ended(stranger)
    agent.advance(FLOODED_TIMES[SILENT])
    agent.poll()
    agent.poll()
    assert ended(stranger)
    assert not ended(member)
    assert len(agent.pending.all()) == 1


def test_accepting_pauses_without_file_descriptors_and_the_poller_does_not_spin(
    agent: FakeAgent, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    accept_one = agent.listener.accept
    link = agent.connect()

    def out_of_files() -> Link | None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(agent.listener, "accept", out_of_files)
    with caplog.at_level(logging.WARNING, "telegrad"):
        assert agent.poll()
        assert not agent.poll()
        for _ in range(20):
            agent.advance(0.1)
            assert agent.poll()
    assert "Too many open files" in caplog.text
    assert caplog.text.count("ulimit") == 1
    with caplog.at_level(logging.WARNING, "telegrad"):
        agent.advance(INTERVAL)
        agent.poll()
    assert caplog.text.count("ulimit") == 2
    monkeypatch.setattr(agent.listener, "accept", accept_one)
    agent.advance(1.0)
    assert agent.poll()
    assert len(agent.pending.all()) == 1
    link.close()


def test_no_more_than_a_quarter_of_the_files_is_for_pending_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    for files, places in ((64, 16), (1 << 20, accept.MAX_PENDING), (2, 1), (-1, accept.MAX_PENDING)):
        monkeypatch.setattr(accept.resource, "getrlimit", lambda kind, files=files: (files, files))
        assert accept._places() == places


def fail_once(link: Link, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Have the next read of `link` refused by the system. Returns a list to which every read is added."""
    receive, reads = link.receive, list[str]()

    def refused_once() -> Iterable[Frame]:
        reads.append("read")
        if len(reads) == 1:
            raise OSError(errno.ENOMEM, "Cannot allocate memory")
        return receive()

    monkeypatch.setattr(link, "receive", refused_once)
    return reads


def test_a_refused_read_is_retried(agent: FakeAgent, monkeypatch: pytest.MonkeyPatch) -> None:
    link = agent.connect()
    agent.settle()
    reads = fail_once(agent.pending.all()[0].link, monkeypatch)
    agent.greet(link)
    agent.settle()
    assert reads == ["read"]
    agent.advance(RETRY_DELAY)
    agent.settle()
    assert reads == ["read"] * 2
    assert [frame.kind for frame in link.receive()] == [Kind.HANDSHAKE]


def test_a_connection_that_is_reported_while_it_is_added_is_read(
    agent: FakeAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread may poll meanwhile, and the poller reports a connection only once."""
    add = agent.poller.add

    def add_and_report(item: Any, **how: Any) -> None:
        add(item, **how)
        for _, ready in agent.poller.wait(0.0):
            item.owner.on_ready(ready)

    link = agent.connect()
    agent.greet(link)
    monkeypatch.setattr(agent.poller, "add", add_and_report)
    agent.listener.owner.on_ready(Ready.READ)
    monkeypatch.undo()
    agent.settle()
    assert [frame.kind for frame in link.receive()] == [Kind.HANDSHAKE]


def test_a_connection_that_cannot_be_polled_is_forgotten(agent: FakeAgent, monkeypatch: pytest.MonkeyPatch) -> None:
    def add(item: object, **_: object) -> None:
        raise OSError(errno.ENOSPC, "no more files may be watched")

    link = agent.connect()
    monkeypatch.setattr(agent.poller, "add", add)
    agent.poll()
    assert ended(link)
    assert not agent.pending.all()


def test_the_retry_of_a_read_leaves_an_admitted_link_to_its_channel(
    agent: FakeAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The retry used to take the first message of the channel for one of the handshake, and to close the link."""
    link = agent.connect()
    agent.settle()
    (connection,) = agent.pending.all()
    reads = fail_once(connection.link, monkeypatch)
    agent.greet(link)
    agent.settle()
    agent.pending.discard(connection)  # as when it is admitted
    agent.advance(RETRY_DELAY)
    agent.settle()
    assert reads == ["read"]
    assert not ended(link)


def test_a_message_that_was_taken_and_not_handled_ends_the_connection(
    agent: FakeAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_memory(body: object) -> None:
        raise MemoryError

    monkeypatch.setattr(pending_connection, "decode_handshake", no_memory)
    link = agent.connect()
    agent.greet(link)
    agent.settle()
    assert ended(link), "otherwise the peer would wait for an answer to what was lost"


def test_a_connection_after_close_is_refused(agent: FakeAgent) -> None:
    agent.pending.close()
    link = agent.connect()
    agent.poll()
    assert ended(link)
    assert not agent.pending.all()


def test_closing_leaves_no_timer(agent: FakeAgent) -> None:
    links = [agent.connect() for _ in range(2)]
    agent.settle()
    agent.greet(links[0])
    agent.pending.close()
    assert all(ended(link) for link in links)
    agent.advance(0.01)
    assert [timer.when for timer in agent.set_timers if timer.action is not None] == []
