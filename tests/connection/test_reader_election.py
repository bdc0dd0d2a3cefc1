"""The thread that waits reads the link. Otherwise the poller does, and only when it must."""

from __future__ import annotations

import operator
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from telegrad.connection.reader_election import ReaderElection
from telegrad.protocol.limits import SessionSettings
from telegrad.settings import AgentSettings
from telegrad.testing.group import local_group
from telegrad.waiting import Event, RealRuntime

CALLS = 100
PATIENCE = 20.0


class FakeReader:
    """A thread that waits for a message."""

    def __init__(self) -> None:
        self.event: Event | None = None
        self.leading = 0
        self.is_done = False

    def done(self) -> bool:
        return self.is_done


class FakeChannel:
    """A channel with only what the election needs. It records how the poller is armed."""

    def __init__(self, *, resumable: bool = False, outgoing: bool = True) -> None:
        self.armed: list[bool] = []
        self.local: Any = SimpleNamespace(runtime=RealRuntime(), poller=self)
        self.lock = threading.Lock()
        self.outgoing = outgoing
        self.resumable = resumable
        self.link: Any = object()

    def arm(self, link: object, *, read: bool) -> None:
        assert link is self.link
        self.armed.append(read)

    def add(self, link: object, *, read: bool, once: bool) -> None:
        assert once is self.outgoing
        self.armed.append(read)


def election(channel: FakeChannel) -> ReaderElection:
    elected: Any = channel
    return ReaderElection(elected)


def test_the_first_thread_leads_and_the_next_one_follows() -> None:
    channel, first, second = FakeChannel(), FakeReader(), FakeReader()
    readers = election(channel)
    assert readers.lead(first, 11) is channel.link
    assert (first.leading, first.event) == (11, None)
    assert readers.lead(second, 22) is None
    assert second.event is not None
    assert not second.event.is_set()
    readers.stop_leading(first)
    assert first.leading == 0
    assert second.event.is_set()
    assert readers.lead(second, 22) is channel.link
    assert channel.armed == [], "the poller was not needed"


def test_a_follower_that_is_done_is_skipped() -> None:
    channel, readers = FakeChannel(), [FakeReader() for _ in range(3)]
    election_ = election(channel)
    for number, reader in enumerate(readers):
        election_.lead(reader, number + 1)
    readers[1].is_done = True
    election_.stop_leading(readers[0])
    assert readers[1].event is not None
    assert not readers[1].event.is_set()
    assert readers[2].event is not None
    assert readers[2].event.is_set()


def test_a_follower_that_was_elected_and_leaves_passes_the_election_on() -> None:
    channel, readers = FakeChannel(), [FakeReader() for _ in range(3)]
    election_ = election(channel)
    for number, reader in enumerate(readers):
        election_.lead(reader, number + 1)
    election_.stop_leading(readers[0])
    election_.stop_following(readers[1])
    assert readers[2].event is not None
    assert readers[2].event.is_set()


def test_the_poller_is_armed_while_futures_wait_and_no_thread_reads() -> None:
    channel, reader = FakeChannel(), FakeReader()
    readers = election(channel)
    with channel.lock:
        readers.unwaited += 1
        readers.arm_poller()
    assert channel.armed == [True]
    readers.lead(reader, 1)
    assert channel.armed == [True, False]
    readers.stop_leading(reader)
    assert channel.armed == [True, False, True]
    readers.expect_fewer(1)
    readers.lead(reader, 1)
    readers.stop_leading(reader)
    assert channel.armed == [True, False, True, False]


def test_the_poller_reads_an_abandoned_channel_for_good() -> None:
    channel, reader = FakeChannel(), FakeReader()
    readers = election(channel)
    readers.leave_to_poller()
    assert channel.armed == [True]
    readers.lead(reader, 1)
    readers.stop_leading(reader)
    assert channel.armed == [True, False, True]


@pytest.mark.parametrize(
    ("resumable", "outgoing", "armed"), [(False, True, False), (True, True, True), (False, False, True)]
)
def test_the_poller_reads_new_links_that_are_resumable_or_incoming(
    resumable: bool, outgoing: bool, armed: bool
) -> None:
    channel = FakeChannel(resumable=resumable, outgoing=outgoing)
    readers = election(channel)
    with channel.lock:
        readers.add_to_poller(channel.link)
    assert channel.armed == [armed]


def test_nobody_leads_without_a_link() -> None:
    channel, reader = FakeChannel(), FakeReader()
    channel.link = None
    assert election(channel).lead(reader, 1) is None
    assert reader.leading == 0
    assert reader.event is not None


@pytest.mark.parametrize("transport", ["unix", "tcp"])
def test_calls_in_quick_succession_do_not_arm_the_poller(transport: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Without ticks: between two calls, a tick would let the poller read.
    settings = AgentSettings(session=SessionSettings(ack_delay=600.0, heartbeat_interval=600.0, silence_limit=2000.0))
    with local_group(["a", "b"], transport=transport, settings=settings) as agents:
        a = agents["a"]
        a.call("b", operator.add, (1, 2))
        armed, arm = [], a.poller.arm

        def count(item: Any, *, read: bool) -> None:
            armed.append(read)
            arm(item, read=read)

        monkeypatch.setattr(a.poller, "arm", count)
        for number in range(CALLS):
            assert a.call("b", operator.add, (number, 1)) == number + 1
        assert armed in ([], [False])  # disarmed once, if the first call left it armed


def test_the_poller_reads_an_idle_tcp_link_after_the_next_tick() -> None:
    with local_group(["a", "b"], transport="tcp") as agents:
        a = agents["a"]
        a.call("b", operator.add, (1, 2))
        channel = a.peers.find("b").outgoing
        assert channel is not None
        deadline = time.monotonic() + PATIENCE
        while not channel.readers.armed and time.monotonic() < deadline:
            a.runtime.event().wait(time.monotonic() + 0.005)
        assert channel.readers.armed
        assert a.call("b", operator.add, (1, 2)) == 3


def test_the_poller_does_not_read_an_idle_unix_link() -> None:
    with local_group(["a", "b"]) as agents:
        agents["a"].call("b", operator.add, (1, 2))
        channel = agents["a"].peers.find("b").outgoing
        assert channel is not None
        assert not channel.readers.armed
