"""When a session tries to connect, and when it gives up."""

from __future__ import annotations

import pytest
from tests.support.sessions import DEFAULTS, PATIENT, make_connected, make_session

from telegrad.protocol.lanes import CONTROL
from telegrad.protocol.session_events import OpenConnection, SessionLost


def test_only_the_initiator_opens_connections() -> None:
    initiator, acceptor = make_session(), make_session(initiator=False)
    assert initiator.next_tick() == 0.0
    assert initiator.tick(0.0) == [OpenConnection()]
    assert acceptor.tick(0.0) == []
    assert acceptor.next_tick() == DEFAULTS.resume_limit


def test_the_pauses_between_attempts_double_up_to_the_limit() -> None:
    session = make_session(limits=PATIENT)
    now, pauses = 0.0, []
    assert session.tick(now) == [OpenConnection()]
    for _ in range(7):
        assert session.refused("refused", now) == []
        due = session.next_tick()
        assert due is not None
        pauses.append(due - now)
        now = due
        assert session.tick(now) == [OpenConnection()]
    assert pauses == pytest.approx([0.02, 0.04, 0.08, 0.16, 0.32, 0.5, 0.5])


def test_a_peer_that_refuses_connections_for_a_second_is_lost() -> None:
    session = make_connected()
    assert session.disconnected("end of file", 9.0) == [OpenConnection()]
    now, effects = 9.0, session.refused("connection refused", 9.0)
    while not effects:
        due = session.next_tick()
        assert due is not None
        now = due
        assert session.tick(now) == [OpenConnection()]
        effects = session.refused("connection refused", now)
    assert isinstance(effects[0], SessionLost)
    assert now == pytest.approx(10.0)
    assert effects[0].reason == "connection refused for 1 s"


def test_an_attempt_that_reached_the_peer_resets_the_refuse_limit() -> None:
    session = make_connected()
    session.disconnected("end of file", 9.0)
    session.refused("refused", 9.0)
    session.tick(9.9)
    assert session.disconnected("broke in the handshake", 9.9) == []
    assert session.tick(10.5) == [OpenConnection()]
    assert session.refused("refused", 10.5) == []


def test_an_attempt_that_is_reported_twice_is_counted_once() -> None:
    session = make_session()
    session.tick(0.0)
    session.refused("refused", 0.0)
    due = session.next_tick()
    assert session.refused("refused, says another thread", 0.01) == []
    assert session.disconnected("closed, says the reader", 0.01) == []
    assert session.next_tick() == due


def test_a_long_lived_connection_resets_the_backoff() -> None:
    session = make_connected()
    session.disconnected("cut", 0.1)
    session.tick(0.2)
    session.connected((0, 0), 0.2)
    assert session.disconnected("cut", 5.0) == [OpenConnection()]
    session.refused("refused", 5.0)
    assert session.next_tick() == pytest.approx(5.0 + DEFAULTS.reconnect_backoff)


def test_an_attempt_without_a_result_ends_in_loss() -> None:
    session = make_connected()
    assert session.disconnected("cut", 1.0) == [OpenConnection()]
    assert session.next_tick() == 31.0
    assert isinstance(session.tick(31.0)[0], SessionLost)


def test_a_short_lived_connection_is_replaced_after_a_pause() -> None:
    session = make_connected()
    assert session.disconnected("cut", 0.1) == []
    assert session.next_tick() == pytest.approx(0.12)


def test_resuming_again_and_again_without_progress_ends_in_loss() -> None:
    session = make_connected()
    session.send(CONTROL, b"never arrives", 1)
    now, effects = 1.0, session.disconnected("cut", 1.0)
    while effects == [OpenConnection()]:
        session.connected((0, 0), now)
        now += 2.0
        effects = session.disconnected("cut", now)
    assert isinstance(effects[0], SessionLost)
    assert now == pytest.approx(31.0)


def test_an_ack_after_resuming_restarts_the_resume_limit() -> None:
    session = make_connected()
    session.send(CONTROL, b"", 1)
    session.send(CONTROL, b"", 1)
    session.disconnected("cut", 1.0)
    session.connected((0, 0), 2.0)
    session.heard(1, 0, 2.0)
    session.disconnected("cut", 29.0)
    assert session.next_tick() == 59.0


def test_an_idle_session_may_reconnect_for_longer_than_the_resume_limit() -> None:
    session = make_connected()
    for now in range(1, 100):
        assert session.disconnected("cut", float(now)) == [OpenConnection()]
        session.connected((0, 0), float(now))


def test_without_resuming_a_broken_handshake_is_retried_until_the_peer_refuses_or_time_is_up() -> None:
    session = make_session(resumable=False)
    session.tick(0.0)
    assert session.refused("no such socket yet", 0.0) == []
    assert session.tick(0.5) == [OpenConnection()]
    assert session.disconnected("the other side has no memory", 0.5) == []
    assert session.tick(1.0) == [OpenConnection()]
    assert session.refused("nobody listens", 1.0) == []
    assert session.tick(2.0) == [OpenConnection()]
    (lost,) = session.refused("nobody listens", 2.0)
    assert isinstance(lost, SessionLost)
    endless = make_session(resumable=False)
    limit = DEFAULTS.resume_limit
    endless.tick(0.0)
    assert endless.disconnected("the other side has no memory", 0.1) == []
    (lost,) = endless.tick(limit)
    assert isinstance(lost, SessionLost)
