"""A worker is declared lost once, and everybody who needs it is told."""

from __future__ import annotations

import logging
import operator
from typing import Any

import pytest
from tests.support.channels import FakeAgent, FakeLink, connected_channel

from telegrad.connection.channel import Channel
from telegrad.connection.lost_workers import LostWorkers
from telegrad.connection.members import Members
from telegrad.connection.peer_table import Peer, PeerTable
from telegrad.connection.worker_record import WorkerRecord
from telegrad.errors import DeadlineExceeded
from telegrad.testing.group import local_group
from telegrad.testing.simulation import Faults, Simulation
from telegrad.transport.memory import MemoryLink
from telegrad.wire.frames import Frame

B = WorkerRecord("b", 1, 2, ())


class Group:
    """Worker a, which has one peer, b, and a connection to it."""

    def __init__(self, *, outgoing: bool = True) -> None:
        self.agent = FakeAgent()
        self.peer = Peer(B)
        self.changes = 0
        self.table = PeerTable()
        self.channel = connected_channel(self.agent, FakeLink())
        if outgoing:
            self.peer.outgoing = self.channel
        else:
            self.channel.outgoing = False
            self.peer.incoming = self.channel
        local: Any = self.agent
        peers: Any = self
        self.members = Members(local)
        self.members.form([self.agent.me, B], is_open=False)
        self.lost_workers = LostWorkers(local, peers)
        self.lost: list[tuple[str, list[Channel], str]] = []
        self.lost_workers.observe(lambda peer, channels, reason: self.lost.append((peer.record.name, channels, reason)))
        self.removed: list[str] = []
        self.listens = False

    def of(self, channel: Channel) -> Peer | None:
        return self.peer if channel in self.peer.channels() else None

    def remove_traces(self, record: WorkerRecord) -> bool:
        self.removed.append(record.name)
        return not self.listens


def test_the_loss_of_a_channel_loses_its_worker_once(caplog: pytest.LogCaptureFixture) -> None:
    group = Group()
    with caplog.at_level(logging.WARNING, "telegrad"):
        group.lost_workers.channel_lost(group.channel, "it is gone")
        group.lost_workers.peer_lost(group.peer, "again")
    assert group.lost == [("b", [group.channel], "it is gone")]
    assert (group.peer.gone, group.peer.left) == ("it is gone", False)
    assert group.channel.session.state.is_over
    assert [record.getMessage() for record in caplog.records] == ["worker 'a' lost worker 'b': it is gone"]


def test_a_channel_that_belongs_to_no_worker_any_more_is_only_closed() -> None:
    group = Group()
    group.peer.outgoing = None
    group.lost_workers.channel_lost(group.channel, "it was replaced")
    assert group.channel.session.state.is_over
    assert group.lost == []


def test_a_goodbye_is_no_loss_and_says_which_error_ended_the_worker() -> None:
    group, goodbyes = Group(), []
    group.lost_workers.on_goodbye = lambda worker, cause: goodbyes.append((worker, cause))
    group.lost_workers.channel_left(group.channel, "with ValueError: no\nsuch file")
    assert goodbyes == [("b", "with ValueError: no?such file")]
    assert group.peer.left
    assert group.lost == [("b", [group.channel], "it ended with ValueError: no?such file")]


def test_a_goodbye_on_the_incoming_channel_leaves_the_replies_on_the_other() -> None:
    group = Group(outgoing=False)
    group.peer.outgoing = connected_channel(group.agent, FakeLink())
    group.lost_workers.channel_left(group.channel, "")
    assert group.lost == []
    group.peer.outgoing = None
    group.lost_workers.channel_left(group.channel, "")
    assert [reason for _, _, reason in group.lost] == ["it has shut down"]


def test_the_socket_of_a_killed_worker_is_removed_when_its_process_is_gone() -> None:
    group = Group()
    group.listens = True
    group.lost_workers.peer_lost(group.peer, "killed")
    assert group.removed == ["b"]
    group.agent.advance(10.0)
    assert group.removed == ["b", "b"]


def test_a_worker_that_is_leaving_does_not_complain_about_losses(caplog: pytest.LogCaptureFixture) -> None:
    group = Group()
    group.agent.leaving = True
    with caplog.at_level(logging.WARNING, "telegrad"):
        group.lost_workers.peer_lost(group.peer, "it left before")
    assert caplog.records == []
    assert len(group.lost) == 1


def test_an_observer_that_fails_does_not_keep_the_others_from_hearing_of_the_loss() -> None:
    group = Group()
    heard: list[str] = []

    def fail(peer: Peer, channels: list[Channel], reason: str) -> None:
        raise LookupError("a bug")

    group.lost_workers.observe(fail)
    group.lost_workers.observe(lambda peer, channels, reason: heard.append(reason))
    group.lost_workers.peer_lost(group.peer, "killed")
    assert heard == ["killed"]


def test_a_socket_that_cannot_be_removed_keeps_nobody_from_hearing_of_the_loss(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    group = Group()

    def fail(record: WorkerRecord) -> bool:
        raise OSError("File name too long")

    monkeypatch.setattr(group, "remove_traces", fail)
    group.lost_workers.peer_lost(group.peer, "killed")
    assert len(group.lost) == 1


def test_the_buffers_of_large_messages_are_freed_when_a_worker_is_lost() -> None:
    with local_group(["a", "b"]) as agents:
        a = agents["a"]
        a.call("b", divmod, (1, 1))
        a.local.buffers.take(8 << 20)
        in_use = a.local.buffers.take(1 << 20)
        assert a.local.buffers.held() == 9 << 20
        a.peers.lost_workers.peer_lost(a.peers.find("b"), "the test lost it")
        assert a.local.buffers.held() == len(in_use)


def test_a_late_handshake_over_a_unix_socket_is_no_death() -> None:
    """The listener admits the opener after that one has given up the connection, and tries another."""
    with Simulation(1, ["a", "b"], resumable=False) as sim:
        transmit, sent = sim.network._transmit, []

        def delay_proof(link: MemoryLink, frame: Frame) -> None:
            if link.origin == "memory://a":
                sent.append(frame)
                if len(sent) == 2:
                    sim.network._last[link] = sim.scheduler.now + 12
            transmit(link, frame)

        def program() -> None:
            sim.network._transmit = delay_proof  # type: ignore[method-assign]
            assert sim["a"].call("b", operator.add, (1, 2)) == 3
            sim.sleep(20)
            assert sim["b"].peers.find("a").gone == ""
            assert sim["b"].call("a", operator.add, (1, 2)) == 3
            assert sim["a"].call("b", operator.add, (1, 2)) == 3

        sim.run(program)


def test_a_process_that_dies_right_after_its_handshake_is_lost() -> None:
    with Simulation(1, ["a", "b"], resumable=False) as sim:

        def program() -> None:
            a = sim["a"]
            a.peers.connector.channel_to(a.peers.find("b"), None)
            sim.kill("a")
            sim.sleep(5)
            assert sim["b"].peers.find("a").gone

        sim.run(program)


def test_a_session_that_its_opener_never_had_is_no_loss() -> None:
    with Simulation(1, ["a", "b"], faults=Faults(shortest_delay=0.002, longest_delay=0.002)) as sim:

        def program() -> None:
            b = sim["b"]

            def give_up() -> None:
                with pytest.raises(DeadlineExceeded):
                    sim["a"].call("b", operator.add, (1, 2), timeout=0.001)

            caller = sim.spawn("a", give_up)
            while b.peers.find("a").incoming is None:
                sim.sleep(0.0005)
            for link in list(sim.network.links):
                sim.network.cut(link, "the connection was cut")
            caller.join(None)
            assert b.peers.find("a").incoming is not None
            sim.sleep(100.0)
            assert b.peers.find("a").incoming is None
            assert not b.peers.find("a").gone
            assert b.call("a", operator.add, (1, 2)) == 3
            assert sim["a"].call("b", operator.add, (1, 2)) == 3

        sim.run(program)


def test_an_opener_that_has_lost_this_worker_is_lost_even_if_nothing_of_it_arrived() -> None:
    """Or others would wait here for what it has sent, such as the creation of a value."""
    with Simulation(1, ["a", "b"]) as sim:

        def program() -> None:
            a, b = sim["a"], sim["b"]
            a.peers.connector.channel_to(a.peers.find("b"), None)
            sim.network.part("a", "b")
            sim.sleep(40.0)
            assert "resume limit" in a.peers.find("b").gone
            assert not b.peers.find("a").gone
            sim.network.heal()
            sim.sleep(10.0)
            assert "this incarnation of worker 'b' was given up" in b.peers.find("a").gone

        sim.run(program)


def test_a_session_that_was_used_is_lost_with_its_opener() -> None:
    with Simulation(1, ["a", "b"]) as sim:

        def program() -> None:
            sim["a"].call("b", operator.add, (1, 2))
            sim.network.part("a", "b")
            sim.sleep(100.0)
            assert "resume limit" in sim["b"].peers.find("a").gone

        sim.run(program)


@pytest.mark.parametrize("is_idle", [True, False])
def test_an_idle_observer_does_not_hear_of_workers_without_a_connection_when_this_worker_leaves(is_idle: bool) -> None:
    heard: list[str] = []
    with local_group(["a", "b", "c", "d"]) as agents:
        a = agents["a"]
        assert a.call("b", operator.add, (1, 2)) == 3
        a.on_lost(lambda record, reason: heard.append(record.name), lambda: is_idle)
        a.close()
        assert {peer.record.name: peer.left for peer in a.peers.all()} == dict.fromkeys("abcd", True)
    assert heard == (["a", "b"] if is_idle else ["a", "b", "c", "d"])
