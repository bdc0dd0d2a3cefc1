"""Sequence numbers, acknowledgements and retransmission of a session's lanes."""

from __future__ import annotations

import pytest
from tests.support.sessions import DEFAULTS, make_connected, make_session

from telegrad.errors import ProtocolError
from telegrad.protocol.lanes import BULK, CONTROL
from telegrad.protocol.session_events import Disposition, SendAck, SessionState


def test_each_lane_has_its_own_sequence_numbers() -> None:
    session = make_connected()
    assert [session.send(lane, b"", 0) for lane in (CONTROL, BULK, CONTROL)] == [1, 1, 2]
    assert session.sent_up_to() == (2, 1)
    assert session.received(BULK, 1, 0, 0, 1.0) is Disposition.DELIVER
    assert session.received(CONTROL, 1, 0, 0, 1.0) is Disposition.DELIVER
    assert session.received_up_to() == (1, 1)


def test_frames_sent_before_the_first_connection_are_retained() -> None:
    for resumable in (True, False):
        session = make_session(resumable)
        session.send(BULK, "large", 10)
        session.send(CONTROL, "small", 1)
        assert session.unacked == (2, 11)
        assert session.connected((0, 0), 0.0) == [(CONTROL, 1, "small"), (BULK, 1, "large")]
        assert session.unacked == ((2, 11) if resumable else (0, 0))


def test_a_new_connection_retransmits_only_frames_that_the_peer_lacks() -> None:
    session = make_connected()
    for frame in ("one", "two", "three"):
        session.send(CONTROL, frame, 1)
    session.send(BULK, "bulk", 100)
    session.disconnected("cut", 1.0)
    assert session.connected((2, 0), 1.1) == [(CONTROL, 3, "three"), (BULK, 1, "bulk")]
    assert session.unacked == (2, 101)
    assert session.unacked_bytes == 101


def test_acks_release_retained_frames_and_old_acks_are_ignored() -> None:
    session = make_connected()
    for frame in range(3):
        session.send(CONTROL, frame, 10)
    assert session.received(BULK, 1, 2, 0, 1.0) is Disposition.DELIVER
    assert session.unacked == (1, 10)
    assert session.heard(1, 0, 1.0) is Disposition.DELIVER
    assert session.unacked == (1, 10)
    session.heard(3, 0, 1.0)
    assert session.unacked == (0, 0)


def test_a_repeated_frame_is_a_duplicate_and_a_skipped_frame_is_a_gap() -> None:
    session = make_connected()
    assert session.received(CONTROL, 1, 0, 0, 1.0) is Disposition.DELIVER
    assert session.received(CONTROL, 1, 0, 0, 1.0) is Disposition.DUPLICATE
    assert session.received(CONTROL, 3, 0, 0, 1.0) is Disposition.GAP
    assert session.received_up_to() == (1, 0)


def test_many_unacknowledged_frames_or_bytes_make_an_ack_urgent() -> None:
    session = make_connected()
    for sequence in range(1, DEFAULTS.ack_every_frames):
        session.received(CONTROL, sequence, 0, 0, 1.0, 10)
    assert not session.ack_urgent
    session.received(CONTROL, DEFAULTS.ack_every_frames, 0, 0, 1.0, 10)
    assert session.ack_urgent
    assert session.next_tick() == 1.0
    assert session.tick(1.0) == [SendAck()]
    assert not session.ack_urgent
    session.received(BULK, 1, 0, 0, 1.0, DEFAULTS.ack_every_bytes)
    assert session.ack_urgent
    session.acks()
    assert not session.ack_urgent


@pytest.mark.parametrize("sequence", [0, 1, 3])
def test_without_resuming_any_sequence_number_but_the_next_is_a_gap(sequence: int) -> None:
    session = make_connected(resumable=False)
    assert session.received(CONTROL, 1, 0, 0, 1.0) is Disposition.DELIVER
    assert session.received(CONTROL, sequence, 0, 0, 1.0) is Disposition.GAP


@pytest.mark.parametrize("claim", [(3, 0), (0, 0), (1, 1)])
def test_an_impossible_count_of_received_frames_is_a_protocol_error(
    claim: tuple[int, int],
) -> None:
    session = make_connected()
    session.send(CONTROL, b"", 1)
    session.send(CONTROL, b"", 1)
    session.heard(1, 0, 1.0)
    session.disconnected("cut", 1.0)
    with pytest.raises(ProtocolError, match="worker 'b' says that it received"):
        session.connected(claim, 2.0)
    assert session.state is SessionState.BROKEN
    assert session.unacked == (1, 1)


def test_an_ack_of_a_frame_that_was_never_sent_is_a_protocol_error() -> None:
    session = make_connected()
    with pytest.raises(ProtocolError, match="worker 'b' acknowledged control frame 1, but only 0 were sent"):
        session.received(CONTROL, 1, 1, 0, 1.0)
    with pytest.raises(ProtocolError, match="worker 'b' acknowledged bulk frame 4"):
        session.heard(0, 4, 1.0)


def test_a_frame_with_an_invalid_lane_or_sequence_number_is_a_protocol_error() -> None:
    session = make_connected()
    with pytest.raises(ProtocolError, match="lane 2"):
        session.received(2, 1, 0, 0, 1.0)
    with pytest.raises(ProtocolError, match="without a sequence"):
        session.received(CONTROL, 0, 0, 0, 1.0)
