"""The registry finds workers, and decides which incarnations of them may connect."""

from __future__ import annotations

from collections.abc import Callable
from threading import Event, Thread
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from tests.support.channels import FakeAgent, FakeLink, connected_channel

from telegrad.connection.channel import Channel
from telegrad.connection.handshake import NONCE_SIZE, Rejected
from telegrad.connection.peer_table import Peer
from telegrad.connection.peers import Peers
from telegrad.connection.worker_record import WorkerRecord
from telegrad.errors import ResourceExhausted, UnknownWorker, WorkerLost
from telegrad.protocol.membership import MAX_STEP, State
from telegrad.settings import AgentSettings
from telegrad.transport.base import LinkClosed
from telegrad.transport.unix import UnixTransport
from telegrad.waiting import RealRuntime
from telegrad.wire.handshake_messages import Hello, Purpose

A = WorkerRecord("a", 0, 1, (), host="here")
B = WorkerRecord("b", 1, 2, ("tcp://127.0.0.1:1",))
LINK: Any = SimpleNamespace(resumable=True)


class PeersAgent(FakeAgent):
    """An agent that records which workers are lost."""

    def __init__(self) -> None:
        super().__init__()
        self.me = A
        self.keys = None
        self.settings = AgentSettings()
        self.buffers: Any = SimpleNamespace(take=lambda size: memoryview(bytearray(size)), trim=lambda: None)

    def submit(self, task: Callable[[], object]) -> None:
        """Record that something was to be done later."""
        self.reported.append(("submitted",))

    def observe(self, peers: Peers) -> None:
        """Record the workers that are declared lost."""
        peers.lost_workers.observe(
            lambda peer, channels, reason: self.reported.append(("peer lost", peer.record.incarnation, reason))
        )


@pytest.fixture
def agent() -> PeersAgent:
    return PeersAgent()


@pytest.fixture
def peers(agent: PeersAgent) -> Peers:
    local: Any = agent
    peers = Peers(local, [])
    peers.set_group([B, A])
    agent.observe(peers)
    return peers


def hello(record: WorkerRecord, **changes: object) -> Hello:
    greeting = Hello(
        name=record.name,
        id=record.id,
        incarnation=record.incarnation,
        generation=record.generation,
        purpose=Purpose.SESSION,
        addresses=record.addresses,
        host=record.host,
        main=record.main,
        tls=record.tls,
        accept=record.accept,
        devices=(),
        target="a",
        dialled="",
        nonce=bytes(NONCE_SIZE),
        attempt=1,
        session=77,
        received=(0, 0),
        fresh=True,
        proof=b"",
    )
    return msgspec.structs.replace(greeting, **changes)


def test_workers_are_found_by_name_and_id(peers: Peers) -> None:
    assert peers.find("b").record is B
    assert peers.find(1).record is B
    assert peers.records() == [A, B]
    assert [peer.record for peer in peers.all()] == [A, B]


@pytest.mark.parametrize("unknown", ["c", 7])
def test_the_error_for_an_unknown_worker_lists_the_known_ones(peers: Peers, unknown: str | int) -> None:
    with pytest.raises(
        UnknownWorker, match=rf"no worker (named|with id) {unknown!r}; the workers are 'a' \(0\), 'b' \(1\)"
    ):
        peers.find(unknown)


@pytest.mark.parametrize("wrong", [None, b"b", 1.5, ("b",)])
def test_what_does_not_name_a_worker_is_refused(peers: Peers, wrong: Any) -> None:
    with pytest.raises(TypeError, match="a worker is given by its name, its id or its WorkerInfo, not by "):
        peers.find(wrong)


def test_a_known_incarnation_may_connect(peers: Peers, agent: PeersAgent) -> None:
    peer = peers.find("b")
    peers.check(hello(B))
    assert peers.find("b") is peer
    assert agent.reported == []


def test_a_new_incarnation_replaces_the_old_one_which_is_lost(peers: Peers, agent: PeersAgent) -> None:
    peers.check(hello(B, incarnation=9, generation=1, addresses=("tcp://127.0.0.1:2",)))
    assert agent.reported == [("peer lost", 2, "it was restarted")]
    record = peers.find("b").record
    assert (record.incarnation, record.addresses) == (9, ("tcp://127.0.0.1:2",))


def test_an_incarnation_that_was_replaced_may_not_return(peers: Peers) -> None:
    for generation, incarnation in enumerate((9, 10), start=1):
        peers.check(hello(B, incarnation=incarnation, generation=generation))
    for generation, incarnation in enumerate((2, 9)):
        with pytest.raises(Rejected, match="'b' was replaced by a later one: restart it") as caught:
            peers.check(hello(B, incarnation=incarnation, generation=generation))
        assert caught.value.code == "incarnation"
    assert peers.find("b").record.incarnation == 10


def test_two_processes_of_one_name_and_generation_cannot_both_be_members(peers: Peers) -> None:
    with pytest.raises(Rejected, match="another process is worker 'b' of this group: give each worker its own name"):
        peers.check(hello(B, incarnation=9))
    assert peers.find("b").record is B


def test_a_question_changes_nothing(peers: Peers, agent: PeersAgent) -> None:
    peers.check(hello(B, incarnation=9, purpose=Purpose.PROBE))
    with pytest.raises(Rejected, match="another process is worker 'b', and it is alive") as caught:
        peers.check(hello(B, incarnation=9, generation=1, purpose=Purpose.VOTE))
    assert caught.value.code == "vote"
    assert peers.find("b").record is B
    assert agent.reported == [("submitted",)] * 2  # it connects to b, to see whether that is alive


def test_a_lost_worker_gets_a_vote_for_its_replacement(peers: Peers) -> None:
    peers.lost_workers.peer_lost(peers.find("b"), "it was silent")
    newcomer = hello(B, incarnation=9, generation=1, purpose=Purpose.VOTE)
    assert peers.known_generation(newcomer) == 0
    peers.check(newcomer)
    peers.check(newcomer)
    assert peers.known_generation(hello(B, incarnation=10)) == 1


@pytest.mark.parametrize("purpose", [Purpose.PROBE, Purpose.VOTE])
def test_a_worker_that_is_leaving_says_so(peers: Peers, agent: PeersAgent, purpose: Purpose) -> None:
    agent.departing = True
    with pytest.raises(Rejected, match="is leaving the group") as caught:
        peers.check(hello(B, incarnation=9, generation=1, purpose=purpose))
    assert caught.value.code == "leaving"


def test_a_generation_that_a_worker_gets_later_is_learned_without_a_loss(peers: Peers, agent: PeersAgent) -> None:
    peer = peers.find("b")
    assert not peers.learn(msgspec.structs.replace(B, generation=3))
    assert (peers.find("b"), peer.record.generation) == (peer, 3)
    peers.check(hello(B, generation=4))
    assert (peers.find("b"), peer.record.generation) == (peer, 4)
    member = peers.members.find("b")
    assert member is not None
    assert member.identity.generation == 4
    assert agent.reported == []


def test_a_worker_cannot_use_up_its_generations(peers: Peers) -> None:
    far = MAX_STEP + 1
    assert not peers.learn(msgspec.structs.replace(B, generation=far))
    with pytest.raises(Rejected, match="far ahead"):
        peers.check(hello(B, generation=far))
    assert peers.find("b").record.generation == 0


def test_an_incarnation_that_was_replaced_since_it_was_admitted_gets_no_session(peers: Peers) -> None:
    peers.check(hello(B, incarnation=9, generation=1))
    peers.check(hello(B, incarnation=10, generation=2))
    with pytest.raises(Rejected, match="'b' was replaced by a later one") as caught:
        peers.resume(LINK, hello(B, incarnation=9, generation=1))
    assert caught.value.code == "incarnation"


def test_a_replacement_is_not_there_before_all_have_heard_of_the_loss_of_its_predecessor(peers: Peers) -> None:
    """Another thread has noticed the loss, and tells those who know the worker by its id."""
    telling, go_on, there = Event(), Event(), Event()

    def observe(peer: Peer, channels: list[Channel], reason: str) -> None:
        telling.set()
        assert go_on.wait(30)

    def admit() -> None:
        peers.check(hello(B, incarnation=9, generation=1))
        there.set()

    peers.lost_workers.observe(observe)
    lost = Thread(target=peers.lost_workers.peer_lost, args=(peers.find("b"), "it was killed"))
    threads = [lost, Thread(target=admit)]
    threads[0].start()
    assert telling.wait(30)
    threads[1].start()
    assert not there.wait(0.1)
    assert peers.find("b").record is B
    go_on.set()
    for thread in threads:
        thread.join(30)
    assert there.is_set()
    assert peers.find("b").record.incarnation == 9
    assert peers.members.state_of(peers.find("b").record) is State.ALIVE


def test_a_replacement_does_not_wait_for_ever_until_all_have_heard(
    peers: Peers, agent: PeersAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent, "wait", lambda event, deadline: False)
    before = peers.find("b")
    before.gone, before.told = "it was killed", RealRuntime().event()  # and a destructor of a value does not return
    peers.check(hello(B, incarnation=9, generation=1))
    assert peers.find("b").record.incarnation == 9


def test_members_are_described_by_id(peers: Peers) -> None:
    peers.lost_workers.peer_lost(peers.find("b"), "it was silent")
    found = [peers.describe(number) for number in range(3)]
    records = [msgspec.msgpack.decode(one.record, type=WorkerRecord) if one.record else None for one in found]
    assert records == [A, B, None]
    assert [State(one.state) for one in found[:2]] == [State.ALIVE, State.LOST]


def test_what_another_member_says_is_learned(peers: Peers, agent: PeersAgent) -> None:
    assert not peers.learn(msgspec.structs.replace(B, incarnation=5))
    later = msgspec.structs.replace(B, incarnation=5, generation=2)
    assert peers.learn(later)
    assert peers.find("b").record is later
    assert agent.reported == [("peer lost", 2, "it was restarted")]


def test_an_incarnation_that_was_given_up_may_not_return(peers: Peers) -> None:
    peers.find("b").gone = "it was silent"
    with pytest.raises(Rejected, match="this incarnation of worker 'b' was given up: it was silent") as caught:
        peers.check(hello(B))
    assert caught.value.code == "incarnation"


def test_a_worker_that_was_given_up_itself_gives_nobody_up(agent: PeersAgent, peers: Peers) -> None:
    peers.find("b").gone = "it has lost this worker"
    agent.given_up = WorkerLost("worker 'a' ends", worker="a")
    with pytest.raises(Rejected, match="it has lost this worker") as caught:
        peers.check(hello(B))
    assert caught.value.code == "session"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"name": "c", "id": 2}, "there is no worker 'c' with id 2 in this group"),
        ({"id": 2}, "there is no worker 'b' with id 2 in this group"),
        ({"name": "a", "id": 0, "incarnation": 9}, "worker 'a' is this worker"),
        ({"name": "a b"}, "invalid worker name 'a b'"),
        ({"id": 1 << 16}, "invalid worker id 65536"),
        ({"incarnation": -1}, "incarnation -1 does not fit in 64 bits"),
        ({"incarnation": 9, "generation": 2**63}, "invalid generation 9223372036854775808"),
        ({"incarnation": 9, "generation": -1}, "invalid generation -1"),
        ({"incarnation": 9, "generation": 2**62}, "far ahead of the last one"),
        ({"addresses": ("tcp://",)}, "invalid address 'tcp://'"),
        ({"addresses": ("ftp://x",)}, "invalid address 'ftp://x'"),
        ({"devices": (("cuda", -1),)}, "-1 devices of the type 'cuda'"),
        ({"devices": (("cuda", 2**40),)}, "devices of the type 'cuda', which cannot be"),
        ({"devices": (("\x1b[2J", 1),)}, r"1 devices of the type '\\x1b\[2J'"),
        ({"devices": (("x" * 2000, 1),)}, "1 devices of the type 'x{64}', which"),
        ({"devices": (("cuda", 1),) * 33}, "33 types of devices; the limit is 32"),
    ],
)
def test_other_identities_are_rejected(peers: Peers, changes: dict[str, object], reason: str) -> None:
    with pytest.raises(Rejected, match=reason):
        peers.check(hello(B, **changes))


def test_only_sockets_in_the_directory_of_workers_are_removed(
    agent: PeersAgent, peers: Peers, monkeypatch: pytest.MonkeyPatch
) -> None:
    removed: list[str] = []
    transport = UnixTransport()
    monkeypatch.setattr(transport, "remove_dead", lambda address: not removed.append(address))
    monkeypatch.setitem(peers._transports, "unix", transport)
    me = peers._local.me
    peers._local.me = msgspec.structs.replace(me, addresses=("unix:///run/x/telegrad/a.sock",))
    theirs = ("unix:///run/x/telegrad/b.sock", "unix:///run/x/bus", "unix:///run/x/telegrad/../bus")
    assert peers.remove_traces(msgspec.structs.replace(B, host=me.host, addresses=theirs))
    assert removed == ["unix:///run/x/telegrad/b.sock", "unix:///run/x/telegrad/b.observe.sock"]


def test_unknown_workers_may_join_if_allowed(peers: Peers) -> None:
    peers.set_group([A, B], is_open=True)
    peers.check(hello(B, name="c", id=2, host="there", accept="registered"))
    joined = peers.find("c").record
    assert (joined.id, joined.host, joined.accept, joined.addresses) == (2, "there", "registered", B.addresses)
    with pytest.raises(Rejected):
        peers.check(hello(B, name="d", id=2))


def test_a_fresh_session_gets_a_channel_and_replaces_the_previous_one(peers: Peers) -> None:
    assert peers.resume(LINK, hello(B)) == (0, 0)
    first = peers.find("b").incoming
    assert first is not None
    assert (first.session_id, first.outgoing) == (77, False)
    assert peers.of(first) is peers.find("b")
    peers.resume(LINK, hello(B, session=78, attempt=2))
    assert first.session.state.is_over
    assert peers.of(first) is None


@pytest.mark.parametrize("stale", [{"session": 76}, {}, {"fresh": False}], ids=["other session", "fresh", "resumed"])
def test_a_connection_that_the_opener_gave_up_replaces_no_later_one(peers: Peers, stale: dict[str, object]) -> None:
    peers.resume(LINK, hello(B, attempt=5))
    channel = peers.find("b").incoming
    assert channel is not None
    for attempt in (4, 5):
        with pytest.raises(LinkClosed, match="has opened another connection since"):
            peers.resume(LINK, hello(B, attempt=attempt, **stale))
    assert peers.find("b").incoming is channel
    assert not channel.session.state.is_over


def test_a_new_incarnation_counts_its_connections_anew(peers: Peers) -> None:
    peers.resume(LINK, hello(B, attempt=5))
    restarted = hello(B, incarnation=9, generation=1, attempt=1, session=78)
    peers.check(restarted)
    assert peers.resume(LINK, restarted) == (0, 0)


def test_a_worker_that_is_lost_between_the_check_and_its_session_gets_no_channel(peers: Peers) -> None:
    make, made = peers.make_channel, []

    def lose(*args: Any, **kwargs: Any) -> Channel:
        peers.lost_workers.peer_lost(peers.find("b"), "its cable was cut")
        made.append(make(*args, **kwargs))
        return made[0]

    peers.make_channel = lose
    peers.check(hello(B))
    with pytest.raises(Rejected, match="this incarnation of worker 'b' was given up: its cable was cut"):
        peers.resume(LINK, hello(B))
    assert peers.find("b").incoming is None
    assert made[0].session.state.is_over


def test_an_unknown_session_cannot_be_resumed(peers: Peers) -> None:
    with pytest.raises(Rejected, match="the session is not known here") as caught:
        peers.resume(LINK, hello(B, fresh=False))
    assert caught.value.code == "session"


def test_traffic_adds_up_both_channels(agent: PeersAgent, peers: Peers) -> None:
    peer = peers.find("b")
    assert peer.traffic() == (0, 0)
    peer.outgoing = connected_channel(agent, FakeLink())
    peer.incoming = connected_channel(agent, FakeLink())
    peer.outgoing.sent, peer.incoming.sent = 1, 2
    peer.outgoing.receiver.received, peer.incoming.receiver.received = 10, 20
    assert peer.traffic() == (3, 30)


def test_the_opener_of_a_dropped_channel_is_looked_for_until_it_is_connected_or_lost(
    agent: PeersAgent, peers: Peers, monkeypatch: pytest.MonkeyPatch
) -> None:
    again: list[Callable[[], object]] = []
    timers: Any = SimpleNamespace(at=lambda when, action: again.append(action))
    executor: Any = SimpleNamespace(submit=lambda task: task(), timers=timers)
    monkeypatch.setattr(agent, "executor", executor)
    attempts: list[str] = []

    def channel_to(peer: Any, deadline: float) -> None:
        attempts.append(peer.record.name)
        raise ResourceExhausted("no descriptors are left")

    monkeypatch.setattr(peers.connector, "channel_to", channel_to)
    peer = peers.find("b")
    channel = connected_channel(agent, FakeLink())
    peers.drop_unused(channel, "never used")
    again.pop()()
    assert attempts == ["b", "b"]
    peer.gone = "it is dead"
    again.pop()()
    assert (attempts, again) == (["b", "b"], [])
