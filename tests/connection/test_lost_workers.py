"""A worker is declared lost once, and everybody who needs it is told."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from tests.support.channels import FakeAgent, FakeLink, connected_channel

from telegrad.connection.channel import Channel
from telegrad.connection.lost_workers import LostWorkers
from telegrad.connection.members import Members
from telegrad.connection.peers import Peer
from telegrad.connection.worker_record import WorkerRecord
from telegrad.testing.group import local_group

B = WorkerRecord("b", 1, 2, ())


class Group:
    """Worker a, which has one peer, b, and a connection to it."""

    def __init__(self, *, outgoing: bool = True) -> None:
        self.agent = FakeAgent()
        self.peer = Peer(B)
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
