"""The rules of a session, one at a time and against an adversarial network.

The property tests drive two sessions as two agents would, in virtual time, over a network that drops, duplicates and
reorders frames, breaks connections at different times for the two ends, refuses connections, and delivers frames of
old connections.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.sessions import DEFAULTS, ENDED, PATIENT, make_connected, make_session

from telegrad.errors import NotInitialized, ProtocolError, WorkerLost
from telegrad.protocol.lanes import BULK, CONTROL
from telegrad.protocol.limits import SessionSettings
from telegrad.protocol.session_events import (
    CloseConnection,
    Disposition,
    OpenConnection,
    SendAck,
    SendPing,
    SessionEffect,
    SessionLost,
    SessionState,
)

# The model: two agents and the network between them


@dataclass(frozen=True)
class Packet:
    """One header and its body."""

    kind: str
    lane: int
    sequence: int
    acks: tuple[int, int]
    sent: tuple[int, int] | None = None
    frame: object = None


@dataclass(eq=False)
class Connection:
    """A queue toward each side, and which ends are closed."""

    toward: tuple[list[Packet], list[Packet]] = field(default_factory=lambda: ([], []))
    closed: list[bool] = field(default_factory=lambda: [False, False])


class World:
    """Two agents, reduced to how they must drive a session. Side 0 is the initiator."""

    def __init__(self, resumable: bool, limits: SessionSettings) -> None:
        self.now = 0.0
        self.resumable = resumable
        self.sessions = [make_session(resumable, side == 0, limits) for side in (0, 1)]
        self.current: list[Connection | None] = [None, None]
        self.old: list[Connection] = []
        # An attempt in progress: its connection, the initiator's hello, and the acceptor's answer, once it was sent.
        self.attempt: tuple[Connection, tuple[int, int], tuple[int, int] | None] | None = None
        self.wanted = False
        self.sent: tuple[list[list[object]], ...] = ([[], []], [[], []])
        self.delivered: tuple[list[list[object]], ...] = ([[], []], [[], []])
        self.goodbye_taken = [False, False]

    # The agents

    def transmit(self, side: int, packet: Packet) -> None:
        connection = self.current[side]
        assert connection is not None
        if not connection.closed[1 - side]:
            connection.toward[1 - side].append(packet)

    def send(self, side: int, lane: int) -> None:
        session = self.sessions[side]
        frame = (side, lane, len(self.sent[side][lane]) + 1)
        try:
            sequence = session.send(lane, frame, 1000)
        except (WorkerLost, NotInitialized):
            return
        self.sent[side][lane].append(frame)
        if session.is_connected:
            self.transmit(side, Packet("frame", lane, sequence, session.acks(), frame=frame))

    def drop_connection(self, side: int) -> None:
        connection = self.current[side]
        if connection is not None:
            connection.closed[side] = True
            self.current[side] = None
            self.old.append(connection)

    def apply(self, side: int, effects: list[SessionEffect]) -> None:
        session = self.sessions[side]
        for effect in effects:
            match effect:
                case SendAck():
                    self.transmit(side, Packet("ack", CONTROL, 0, session.acks()))
                case SendPing():
                    self.transmit(side, Packet("ping", CONTROL, 0, session.acks(), session.sent_up_to()))
                case CloseConnection():
                    self.drop_connection(side)
                case OpenConnection():
                    assert side == 0
                    assert not self.wanted
                    assert self.attempt is None
                    self.wanted = True
                case SessionLost():
                    self.drop_connection(side)
        if session.state in ENDED:
            self.drop_connection(side)
            if side == 0:
                self.wanted = False
                self.abandon_attempt()

    def take(self, side: int, packet: Packet) -> None:
        session = self.sessions[side]
        before = session.state
        if packet.kind == "frame":
            disposition = session.received(packet.lane, packet.sequence, *packet.acks, self.now, 1000)
        else:
            disposition = session.heard(*packet.acks, self.now, packet.sent)
        if before is not SessionState.CONNECTED:
            assert disposition is Disposition.DROP
        if disposition is Disposition.GAP:
            self.drop_connection(side)
            self.apply(side, session.disconnected("a gap", self.now))
        elif disposition is Disposition.DELIVER and packet.kind == "frame":
            self.delivered[side][packet.lane].append(packet.frame)
            if session.ack_urgent:
                self.transmit(side, Packet("ack", CONTROL, 0, session.acks()))
        elif disposition is Disposition.DELIVER and packet.kind == "goodbye":
            session.hear_goodbye()
            self.goodbye_taken[side] = True
            self.apply(side, [])

    def tick(self, side: int) -> None:
        session = self.sessions[side]
        self.apply(side, session.tick(self.now))
        due = session.next_tick()
        assert due is None or due > self.now, "a tick must do everything that is due, or the agent's timer spins"
        if due is None:
            not_resumable = session.is_connected and not self.resumable
            assert session.state in ENDED or not_resumable, "every other state has a timeout"

    def say_goodbye(self, side: int) -> None:
        session = self.sessions[side]
        acks, sent = session.acks(), session.sent_up_to()
        if session.say_goodbye(self.now):
            self.transmit(side, Packet("goodbye", CONTROL, 0, acks, sent))
        self.apply(side, [])

    # Handshakes

    def abandon_attempt(self) -> None:
        if self.attempt is not None:
            self.attempt[0].closed[0] = True
            self.attempt = None

    def refuse(self) -> None:
        if self.wanted:
            self.wanted = False
            self.apply(0, self.sessions[0].refused("connection refused", self.now))

    def open(self) -> None:
        if self.wanted:
            self.wanted = False
            self.attempt = (Connection(), self.sessions[0].received_up_to(), None)

    def hello_arrives(self) -> None:
        if self.attempt is None or self.attempt[2] is not None:
            return
        connection, hello, _ = self.attempt
        acceptor = self.sessions[1]
        if acceptor.is_connected:
            self.drop_connection(1)
            self.apply(1, acceptor.disconnected("the initiator opened a new connection", self.now))
        if acceptor.state in ENDED:
            self.abandon_attempt()
            self.sessions[0].mark_lost("the peer has ended this session")
            self.apply(0, [])
            return
        answer = acceptor.received_up_to()
        self.adopt(1, connection, hello)
        self.attempt = (connection, hello, answer)

    def answer_arrives(self) -> None:
        if self.attempt is None or self.attempt[2] is None:
            return
        connection, _, answer = self.attempt
        self.attempt = None
        self.adopt(0, connection, answer)

    def attempt_breaks(self) -> None:
        if self.attempt is not None:
            self.abandon_attempt()
            self.apply(0, self.sessions[0].disconnected("broke in the handshake", self.now))

    def adopt(self, side: int, connection: Connection, peer_received: tuple[int, int]) -> None:
        session = self.sessions[side]
        self.current[side] = connection
        for lane, sequence, frame in session.connected(peer_received, self.now):
            self.transmit(side, Packet("frame", lane, sequence, session.acks(), frame=frame))

    # The network

    def deliver(self, side: int) -> None:
        connection = self.current[side]
        if connection is not None and connection.toward[side]:
            self.take(side, connection.toward[side].pop(0))

    def late(self, side: int, which: int) -> None:
        """Deliver a frame of an old connection, which an agent must never do."""
        waiting = [c for c in self.old if c.toward[side] and c is not self.current[side]]
        if waiting:
            queue = waiting[which % len(waiting)].toward[side]
            self.take(side, queue.pop(which % len(queue)))

    def cut(self, side: int) -> None:
        if self.current[side] is not None:
            self.drop_connection(side)
            self.apply(side, self.sessions[side].disconnected("cut", self.now))

    def notice_end_of_file(self, side: int) -> None:
        connection = self.current[side]
        if connection is not None and connection.closed[1 - side] and not connection.toward[side]:
            self.cut(side)

    def mangle(self, side: int, which: int, how: str) -> None:
        connection = self.current[side]
        if connection is None or not connection.toward[side]:
            return
        queue = connection.toward[side]
        index = which % len(queue)
        if how == "drop":
            queue.pop(index)
        elif how == "duplicate":
            queue.insert(which % (len(queue) + 1), queue[index])
        else:
            queue.append(queue.pop(index))

    def connect(self) -> None:
        """Complete a handshake, if the initiator wants to connect."""
        self.tick(0)
        self.open()
        self.hello_arrives()
        self.answer_arrives()

    def burst(self, side: int, lane: int, count: int) -> None:
        for _ in range(count):
            self.send(side, lane)

    def stream(self, side: int, count: int) -> None:
        for _ in range(count):
            self.deliver(side)

    # Invariants

    def check(self) -> None:
        for side in (0, 1):
            session = self.sessions[side]
            for lane in (CONTROL, BULK):
                got, sent = self.delivered[side][lane], self.sent[1 - side][lane]
                assert got == sent[: len(got)], "exactly once and in order"
            if self.goodbye_taken[side]:
                assert self.delivered[side] == self.sent[1 - side], "a goodbye hides no gap"
            if session.state in ENDED:
                assert session.unacked == (0, 0)
                assert session.next_tick() is None
            assert (session.lost_reason is None) == (session.state is not SessionState.LOST)
            if not self.resumable and session.is_connected:
                assert session.unacked == (0, 0)
            if self.resumable and session.state not in ENDED:
                missing = sum(map(len, self.sent[side])) - sum(map(len, self.delivered[1 - side]))
                assert session.unacked[0] >= missing, "frames that have not arrived are retained"

    def all_delivered(self) -> bool:
        return self.delivered[0] == self.sent[1] and self.delivered[1] == self.sent[0]

    def step_of_a_healthy_network(self) -> bool:
        """Do what can be done without time passing. Return False if there is nothing."""
        before = (self.wanted, self.attempt)
        self.open()
        self.hello_arrives()
        self.answer_arrives()
        progress = (self.wanted, self.attempt) != before
        for side in (0, 1):
            connection = self.current[side]
            if connection is not None and (connection.toward[side] or connection.closed[1 - side]):
                progress = True
                self.deliver(side)
                self.notice_end_of_file(side)
        self.check()
        return progress

    def pass_time(self) -> None:
        due = [at for session in self.sessions if (at := session.next_tick()) is not None]
        if due:
            self.now = max(self.now, min(due))
        for side in (0, 1):
            self.tick(side)
        self.check()

    def heal(self) -> None:
        """Let the network work until nothing is in flight, or both sides have ended."""
        for _ in range(500):
            while self.step_of_a_healthy_network():
                pass
            if all(session.state in ENDED for session in self.sessions):
                return
            quiet = all(session.is_connected and session.unacked == (0, 0) for session in self.sessions)
            if quiet and self.current[0] is self.current[1] and self.all_delivered():
                return
            self.pass_time()
        raise AssertionError(f"never idle: {[s.state for s in self.sessions]}, {[s.unacked for s in self.sessions]}")

    def die(self, refuse: bool) -> None:
        """Deliver nothing from now on; attempts are refused, or never get a result."""
        self.abandon_attempt()
        for _ in range(2000):
            for connection in self.current:
                if connection is not None:
                    connection.toward[0].clear()
                    connection.toward[1].clear()
            if all(session.state in ENDED for session in self.sessions):
                return
            if refuse:
                self.refuse()
            self.wanted = False
            self.pass_time()
        raise AssertionError(f"waiting forever: {[s.state for s in self.sessions]}")


SIDE = st.integers(0, 1)
WHICH = st.integers(0, 50)
Schedule = list[tuple[str, tuple]]


def action(name: str, *arguments: st.SearchStrategy[object]) -> st.SearchStrategy[tuple[str, tuple[object, ...]]]:
    return st.tuples(st.just(name), st.tuples(*arguments))


def schedules(*, goodbye: bool = False, longest_pause: float = 1.0) -> st.SearchStrategy[Schedule]:
    actions = [
        action("burst", SIDE, SIDE, st.integers(1, 6)),
        action("mangle", SIDE, WHICH, st.sampled_from(["drop", "duplicate", "reorder"])),
        action("stream", SIDE, st.integers(1, 10)),
        action("connect"),
        action("open"),
        action("hello_arrives"),
        action("answer_arrives"),
        action("attempt_breaks"),
        action("refuse"),
        action("cut", SIDE),
        action("notice_end_of_file", SIDE),
        action("late", SIDE, WHICH),
        action("tick", SIDE),
        action("wait", st.floats(0.001, 0.6) | st.floats(0.001, longest_pause)),
    ]
    if goodbye:
        actions.append(action("say_goodbye", SIDE))
    # Lists are short on average, and most faults need a connection and frames in flight to show.
    opening = [("connect", ()), ("burst", (0, CONTROL, 3)), ("burst", (1, BULK, 3))]
    return st.lists(st.one_of(actions), min_size=15, max_size=60).map(lambda rest: opening + rest) | st.lists(
        st.one_of(actions), max_size=20
    )


def play(world: World, schedule: Schedule) -> None:
    for name, arguments in schedule:
        if name == "wait":
            world.now += arguments[0]
        else:
            getattr(world, name)(*arguments)
        world.check()


@settings(max_examples=300, deadline=None)
@given(schedules(longest_pause=40.0))
def test_frames_are_delivered_once_and_in_order_when_the_network_recovers(schedule: Schedule) -> None:
    world = World(True, PATIENT)
    play(world, schedule)
    world.heal()
    assert [session.state for session in world.sessions] == [SessionState.CONNECTED, SessionState.CONNECTED]
    assert world.all_delivered()
    assert [session.unacked for session in world.sessions] == [(0, 0), (0, 0)]


@settings(max_examples=200, deadline=None)
@given(schedules(longest_pause=20.0))
def test_all_frames_are_delivered_or_both_sides_end_and_one_is_lost(schedule: Schedule) -> None:
    world = World(True, DEFAULTS)
    play(world, schedule)
    world.heal()
    states = [session.state for session in world.sessions]
    if states == [SessionState.CONNECTED, SessionState.CONNECTED]:
        assert world.all_delivered()
    else:
        assert SessionState.LOST in states
        assert all(state in ENDED for state in states)


@settings(max_examples=200, deadline=None)
@given(schedules(goodbye=True), st.booleans())
def test_both_sides_end_in_bounded_time_when_the_network_dies(schedule: Schedule, refuse: bool) -> None:
    world = World(True, DEFAULTS)
    play(world, schedule)
    died = world.now
    world.die(refuse)
    assert world.now - died <= DEFAULTS.silence_limit + DEFAULTS.resume_limit + 1e-6


@settings(max_examples=200, deadline=None)
@given(schedules(goodbye=True))
def test_a_goodbye_at_any_time_ends_both_sides_and_hides_no_gap(schedule: Schedule) -> None:
    world = World(True, DEFAULTS)
    play(world, schedule)
    for side in (0, 1):
        world.say_goodbye(side)
        world.check()
    world.heal()
    assert all(session.state in ENDED for session in world.sessions)


@settings(max_examples=200, deadline=None)
@given(schedules())
def test_a_session_without_resuming_delivers_in_order_or_is_lost(schedule: Schedule) -> None:
    world = World(False, DEFAULTS)
    play(world, schedule)
    # Nothing is retransmitted here, so one more frame reveals what the model dropped at the very end.
    world.open()
    world.hello_arrives()
    world.answer_arrives()
    for side in (0, 1):
        for lane in (CONTROL, BULK):
            world.send(side, lane)
    world.heal()
    states = [session.state for session in world.sessions]
    assert world.all_delivered() or SessionState.LOST in states
    if SessionState.LOST in states:
        assert states == [SessionState.LOST, SessionState.LOST]


@given(st.lists(st.tuples(SIDE, st.integers(1, 40)), max_size=30))
def test_no_frames_are_retained_when_a_healthy_network_is_idle(bursts: list[tuple[int, int]]) -> None:
    world = World(True, DEFAULTS)
    for side, count in bursts:
        for _ in range(count):
            world.send(side, BULK)
        world.heal()
        assert [session.unacked for session in world.sessions] == [(0, 0), (0, 0)]
    assert world.all_delivered()


# One behaviour at a time


@pytest.mark.parametrize("sent_up_to", [(2, 0), (1, 1)])
def test_a_ping_reveals_a_missing_frame(sent_up_to: tuple[int, int]) -> None:
    session = make_connected()
    session.received(CONTROL, 1, 0, 0, 1.0)
    assert session.heard(0, 0, 1.0, (1, 0)) is Disposition.DELIVER
    assert session.heard(0, 0, 1.0, sent_up_to) is Disposition.GAP


def test_an_ack_is_sent_after_a_delay_unless_another_frame_carries_it() -> None:
    session = make_connected()
    session.received(CONTROL, 1, 0, 0, 1.0)
    due = session.next_tick()
    assert due == pytest.approx(1.0 + DEFAULTS.ack_delay)
    assert session.tick(1.0) == []
    assert session.tick(due) == [SendAck()]
    assert session.tick(due) == []
    session.received(CONTROL, 2, 0, 0, 2.0)
    assert session.acks() == (2, 0)
    assert session.tick(2.5) == []


def test_a_ping_is_sent_only_when_no_frame_was_sent() -> None:
    session = make_connected()
    assert session.next_tick() == 5.0
    assert session.tick(4.9) == []
    assert session.tick(5.0) == [SendPing()]
    session.send(CONTROL, b"", 0)
    assert session.tick(10.0) == []
    assert session.tick(15.0) == [SendPing()]


def test_a_ping_carries_the_pending_ack() -> None:
    session = make_connected()
    session.received(CONTROL, 1, 0, 0, 4.99)
    assert session.tick(5.5) == [SendPing()]
    assert session.tick(6.0) == []


def test_silence_closes_the_connection_and_then_loses_the_peer() -> None:
    session = make_connected(initiator=False)
    session.heard(0, 0, 7.0)
    assert not any(isinstance(effect, CloseConnection) for effect in session.tick(36.9))
    [cut] = session.tick(37.0)
    assert isinstance(cut, CloseConnection)
    assert "worker 'b' sent nothing for 30 s" in cut.reason
    assert session.state is SessionState.BROKEN
    assert session.next_tick() == 67.0
    assert session.tick(66.9) == []
    [lost] = session.tick(67.0)
    assert isinstance(lost, SessionLost)
    assert "worker 'b' sent nothing" in lost.reason
    assert session.lost_reason == lost.reason


def test_an_initiator_that_closes_a_silent_connection_reconnects_at_once() -> None:
    session = make_connected()
    effects = session.tick(30.0)
    assert [type(effect) for effect in effects] == [CloseConnection, OpenConnection]
    assert session.disconnected("the reader saw the end of the connection that was cut", 30.0) == []


def test_missing_acks_of_a_peer_that_still_sends_close_the_connection() -> None:
    session = make_connected(initiator=False)
    session.send(BULK, b"", 1)
    session.tick(1.0)
    session.heard(0, 0, 10.9)
    assert session.tick(10.9) == []
    session.heard(0, 0, 11.0)
    assert session.next_tick() == 11.0
    [cut] = session.tick(11.0)
    assert isinstance(cut, CloseConnection)
    assert "acknowledged nothing for 10 s" in cut.reason


def test_the_silence_limit_applies_to_a_peer_that_sends_nothing_at_all() -> None:
    session = make_connected(initiator=False)
    session.send(BULK, b"", 1)
    session.tick(1.0)
    session.heard(0, 0, 2.0)
    assert not any(isinstance(effect, CloseConnection) for now in range(3, 32) for effect in session.tick(now))
    assert isinstance(session.tick(32.0)[0], CloseConnection)


def test_a_slow_lane_that_makes_progress_is_not_closed() -> None:
    session = make_connected()
    for _ in range(20):
        session.send(BULK, b"", 1)
    for ack in range(1, 20):
        session.heard(0, ack, ack * 9.0)
        assert not any(isinstance(effect, CloseConnection) for effect in session.tick(ack * 9.0))


def test_a_new_connection_restarts_all_timers() -> None:
    session = make_connected(initiator=False)
    session.send(CONTROL, b"", 1)
    session.tick(1.0)
    session.disconnected("cut", 2.0)
    session.connected((0, 0), 20.0)
    assert session.heard(0, 0, 20.5) is Disposition.DELIVER
    assert session.tick(21.0) == []
    assert session.next_tick() == 25.0
    assert session.tick(25.0) == [SendPing()]
    session.disconnected("cut", 25.0)
    session.connected((1, 0), 30.0)
    assert not any(isinstance(effect, CloseConnection) for effect in session.tick(59.9))
    assert isinstance(session.tick(60.0)[0], CloseConnection)


def test_without_resuming_the_end_of_the_connection_is_the_loss_of_the_peer() -> None:
    session = make_connected(resumable=False)
    assert session.disconnected("end of file", 1.0) == [SessionLost("end of file")]
    assert session.state is SessionState.LOST


def test_without_resuming_nothing_is_retained_acknowledged_or_waited_for() -> None:
    session = make_connected(resumable=False)
    session.send(CONTROL, b"", 1)
    assert session.unacked == (0, 0)
    assert session.received(CONTROL, 1, 0, 0, 1.0) is Disposition.DELIVER
    assert session.acks() == (0, 0)
    assert session.next_tick() is None
    assert session.tick(1e9) == []


@pytest.mark.parametrize("resumable", [True, False])
def test_after_a_goodbye_the_end_of_the_connection_is_not_a_loss(resumable: bool) -> None:
    leaving, left = make_connected(resumable), make_connected(resumable)
    assert leaving.say_goodbye(1.0)
    left.hear_goodbye()
    for session in (leaving, left):
        assert session.disconnected("end of file", 2.0) == []
        assert session.state is SessionState.CLOSED
        assert session.lost_reason is None
        assert session.next_tick() is None


def test_frames_are_delivered_after_our_goodbye_until_the_peer_says_goodbye() -> None:
    session = make_connected()
    session.say_goodbye(1.0)
    assert session.state is SessionState.CONNECTED
    assert session.received(CONTROL, 1, 0, 0, 1.0) is Disposition.DELIVER
    session.hear_goodbye()
    assert session.state is SessionState.CLOSED
    assert session.received(CONTROL, 2, 0, 0, 1.0) is Disposition.DROP


def test_a_session_may_send_after_the_goodbye_of_its_peer() -> None:
    session = make_connected()
    session.hear_goodbye()
    assert session.send(CONTROL, b"a last reply", 12) == 1
    assert session.received(CONTROL, 1, 0, 0, 1.0) is Disposition.DROP
    assert session.say_goodbye(1.0)
    assert session.state is SessionState.CLOSED
    assert session.unacked == (0, 0)


def test_a_goodbye_without_a_connection_closes_the_session_at_once() -> None:
    fresh, broken = make_session(), make_connected()
    broken.disconnected("cut", 1.0)
    for session in (fresh, broken):
        assert not session.say_goodbye(2.0)
        assert session.state is SessionState.CLOSED
        assert not session.say_goodbye(3.0)


@pytest.mark.parametrize("resumable", [True, False])
def test_a_goodbye_without_an_answer_ends_at_its_limit(resumable: bool) -> None:
    session = make_connected(resumable)
    session.say_goodbye(1.0)
    for now in (10.0, 20.0, 30.0):
        session.heard(0, 0, now)
        assert not any(isinstance(effect, CloseConnection) for effect in session.tick(now))
    [cut] = session.tick(31.0)
    assert isinstance(cut, CloseConnection)
    assert "did not answer the goodbye" in cut.reason
    assert session.state is SessionState.CLOSED


def test_sending_after_the_end_raises_an_error_with_the_reason() -> None:
    lost, leaving, left = make_connected(), make_connected(), make_connected()
    lost.mark_lost("another incarnation connected")
    lost.mark_lost("a second reason")
    with pytest.raises(WorkerLost, match="worker 'b' is lost: another incarnation connected") as error:
        lost.send(CONTROL, b"", 0)
    assert error.value.worker == "b"
    leaving.say_goodbye(1.0)
    with pytest.raises(NotInitialized, match="this worker is shutting down"):
        leaving.send(CONTROL, b"", 0)
    left.hear_goodbye()
    left.disconnected("end of file", 1.0)
    with pytest.raises(WorkerLost, match="worker 'b' has left"):
        left.send(CONTROL, b"", 0)


def test_a_lost_session_delivers_retains_and_attempts_nothing() -> None:
    session = make_connected()
    session.send(CONTROL, b"", 1)
    session.mark_lost("killed")
    assert session.received(CONTROL, 1, 0, 0, 1.0) is Disposition.DROP
    assert session.heard(0, 0, 1.0) is Disposition.DROP
    assert session.unacked == (0, 0)
    assert session.tick(1e9) == []
    assert session.next_tick() is None
    assert session.disconnected("x", 1.0) == []
    assert session.refused("x", 1.0) == []
    assert not session.say_goodbye(1.0)
    session.hear_goodbye()
    assert session.state is SessionState.LOST


def test_a_closed_session_cannot_be_lost() -> None:
    session = make_session()
    session.say_goodbye(0.0)
    session.mark_lost("too late")
    assert session.state is SessionState.CLOSED


def test_frames_without_a_connection_are_dropped_and_not_counted_as_received() -> None:
    session = make_connected()
    session.disconnected("cut", 1.0)
    assert session.received(CONTROL, 1, 0, 0, 1.0) is Disposition.DROP
    assert session.received_up_to() == (0, 0)


def test_a_connection_for_a_connected_or_ended_session_is_a_protocol_error() -> None:
    connected, lost = make_connected(), make_connected()
    with pytest.raises(ProtocolError, match="session that is connected"):
        connected.connected((0, 0), 1.0)
    lost.mark_lost("killed")
    with pytest.raises(ProtocolError, match="session that is lost: killed"):
        lost.connected((0, 0), 1.0)


@pytest.mark.parametrize("is_numbered", [True, False])
def test_a_session_was_used_once_anything_was_received(is_numbered: bool) -> None:
    session = make_connected(True, False)
    assert not session.was_used
    if is_numbered:
        session.received(CONTROL, 1, 0, 0, 1.0)
    else:
        session.heard(0, 0, 1.0)
    assert session.was_used
