"""The driver sends acks and pings when they are due, and asks for a new link when the old one is lost."""

from __future__ import annotations

import pytest
from tests.support.channels import FakeAgent, FakeLink, connected_channel

from telegrad.protocol.limits import SessionSettings
from telegrad.transport.base import LinkClosed
from telegrad.wire.frames import Frame, Kind
from telegrad.wire.packing import pack_small

SETTINGS = SessionSettings()


@pytest.fixture
def agent() -> FakeAgent:
    return FakeAgent()


@pytest.fixture
def link() -> FakeLink:
    return FakeLink()


def test_a_received_message_is_acknowledged_after_the_delay(agent: FakeAgent, link: FakeLink) -> None:
    channel = connected_channel(agent, link, resumable=True)
    link.incoming = [Frame(Kind.MESSAGE, 1, 0, 0, bytes(pack_small(b"head", b"").body))]
    channel.receiver.pump()
    assert link.sent == []
    agent.advance(SETTINGS.ack_delay)
    assert [kind for kind, _, _ in link.sent] == [Kind.ACK]


def test_an_idle_session_sends_pings(agent: FakeAgent, link: FakeLink) -> None:
    connected_channel(agent, link, resumable=True)
    agent.advance(SETTINGS.heartbeat_interval)
    assert [kind for kind, _, _ in link.sent] == [Kind.PING]


def test_a_session_that_cannot_resume_has_no_timers(agent: FakeAgent, link: FakeLink) -> None:
    connected_channel(agent, link, resumable=False)
    assert [timer for timer in agent.set_timers if timer.action is not None] == []


def test_a_silent_connection_is_cut_and_reopened(agent: FakeAgent, link: FakeLink) -> None:
    channel = connected_channel(agent, link, resumable=True)
    while agent.time < SETTINGS.silence_limit + 2 * SETTINGS.heartbeat_interval:
        agent.advance(SETTINGS.heartbeat_interval)
    assert link.closed
    assert channel.link is None
    assert ("reconnect",) in agent.reported


def test_a_lost_link_is_reopened(agent: FakeAgent, link: FakeLink) -> None:
    channel = connected_channel(agent, link, resumable=True)
    link.incoming = [LinkClosed("end of file")]
    channel.receiver.pump()
    agent.advance(SETTINGS.reconnect_backoff_limit)
    assert ("reconnect",) in agent.reported
    assert not any(event[0] == "lost" for event in agent.reported)


def test_a_closed_channel_has_no_timers(agent: FakeAgent, link: FakeLink) -> None:
    channel = connected_channel(agent, link, resumable=True)
    channel.close("the test is over")
    assert [timer for timer in agent.set_timers if timer.action is not None] == []
    assert link.closed
