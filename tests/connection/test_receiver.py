"""Frames become messages, and failures end the link, the session or neither, depending on whose fault they are."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

import pytest
from tests.support.channels import FakeAgent, FakeLink, connected_channel

from telegrad.connection.channel import Channel
from telegrad.execution.executor import GuaranteedTask
from telegrad.transport.base import LinkClosed, Ready
from telegrad.wire.frames import Frame, Kind, pack_ping
from telegrad.wire.packing import pack_small

HEAD = b"head"


def message(sequence: int) -> Frame:
    return Frame(Kind.MESSAGE, sequence, 0, 0, bytes(pack_small(HEAD, b"data").body))


@pytest.fixture
def agent() -> FakeAgent:
    return FakeAgent()


@pytest.fixture
def link() -> FakeLink:
    return FakeLink()


@pytest.fixture
def channel(agent: FakeAgent, link: FakeLink) -> Channel:
    return connected_channel(agent, link)


def test_messages_are_delivered_and_counted(agent: FakeAgent, link: FakeLink, channel: Channel) -> None:
    link.incoming = [message(1), message(2)]
    channel.receiver.pump()
    assert agent.reported == [("delivered", HEAD)] * 2
    assert channel.receiver.received == 2 * len(message(1).body)


def test_a_message_that_could_not_be_delivered_leaves_nothing_held_for_the_next(
    agent: FakeAgent, link: FakeLink, channel: Channel
) -> None:
    held: Any = "what a large message holds"
    channel.receiver.held = held
    agent.fail_delivery, agent.can_report = RuntimeError("a bug"), True
    link.incoming = [message(1)]
    channel.receiver.pump()
    assert channel.receiver.held is None


def test_a_duplicate_is_dropped(agent: FakeAgent, link: FakeLink) -> None:
    channel = connected_channel(agent, link, resumable=True)
    link.incoming = [message(1), message(1)]
    channel.receiver.pump()
    assert agent.reported == [("delivered", HEAD)]


def test_the_poller_reads_unless_a_thread_does(agent: FakeAgent, link: FakeLink, channel: Channel) -> None:
    channel.readers.reading = True
    link.incoming = [message(1)]
    channel.receiver.on_ready(Ready.READ)
    assert agent.reported == []
    channel.readers.reading = False
    channel.receiver.on_ready(Ready.READ)
    assert agent.reported == [("delivered", HEAD)]
    assert not channel.readers.reading


def test_completions_are_submitted_after_reading(link: FakeLink, channel: Channel) -> None:
    completed: list[int] = []
    channel.readers.unwaited = 2
    channel.receiver.completions = [GuaranteedTask(partial(completed.append, number)) for number in (1, 2)]
    channel.receiver.pump()
    assert completed == [1, 2]
    assert channel.readers.unwaited == 0
    assert channel.receiver.completions == []


def test_a_missing_frame_ends_the_session(agent: FakeAgent, link: FakeLink, channel: Channel) -> None:
    link.incoming = [message(2)]
    channel.receiver.pump()
    ((event, reason),) = agent.reported
    assert event == "lost"
    assert "frame 2 of lane 0 arrived before its predecessors" in reason
    assert link.closed
    assert channel.link is None


def test_the_end_of_the_link_is_handled(agent: FakeAgent, link: FakeLink, channel: Channel) -> None:
    link.incoming = [LinkClosed("end of file")]
    channel.receiver.pump()
    assert [event[0] for event in agent.reported] == ["lost"]
    assert link.closed


def test_a_frame_about_shared_memory_is_an_error_where_there_is_none(
    agent: FakeAgent, link: FakeLink, channel: Channel
) -> None:
    link.incoming = [Frame(Kind.SLAB_OFFER, 0, 0, 0, b"")]
    channel.receiver.pump()
    assert "about shared memory, which this connection does not have" in agent.reported[0][1]


def test_a_goodbye_is_reported_with_its_cause(agent: FakeAgent, link: FakeLink, channel: Channel) -> None:
    link.incoming = [Frame(Kind.GOODBYE, 0, 0, 0, pack_ping(0, 0) + b"out of memory")]
    channel.receiver.pump()
    assert agent.reported == [("left", "out of memory")]


@pytest.mark.parametrize("can_report", [True, False])
def test_a_failed_delivery_ends_the_session_only_if_it_cannot_be_reported(
    agent: FakeAgent, link: FakeLink, channel: Channel, can_report: bool
) -> None:
    agent.fail_delivery, agent.can_report = ValueError("a bug"), can_report
    link.incoming = [message(1)]
    channel.receiver.pump()
    assert agent.reported[0] == ("undelivered", agent.fail_delivery)
    assert (channel.link is not None) == can_report
    assert [event[0] for event in agent.reported[1:]] == ([] if can_report else ["lost"])


def test_reading_is_retried_after_running_out_of_memory(agent: FakeAgent, link: FakeLink, channel: Channel) -> None:
    link.incoming = [MemoryError(), message(1)]
    channel.receiver.pump()
    assert agent.reported == [("paused",)]
    agent.advance(0.0)
    assert agent.reported == [("paused",), ("delivered", HEAD)]


def test_an_unexpected_exception_closes_the_link_and_propagates(
    agent: FakeAgent, link: FakeLink, channel: Channel, caplog: Any
) -> None:
    link.incoming = [KeyboardInterrupt()]
    with caplog.at_level(logging.WARNING, "telegrad"), pytest.raises(KeyboardInterrupt):
        channel.receiver.pump()
    assert link.closed
    assert "KeyboardInterrupt on this worker, in the middle of receiving" in caplog.text
