"""A member of collectives with others below it: when it answers whom, and what it does if groups differ."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from functools import partial
from typing import Any

import msgspec
import pytest

from telegrad.agent.agent import Agent
from telegrad.calls import collective_node
from telegrad.calls.collective_messages import Arrival, Round
from telegrad.calls.collective_node import CollectiveNode
from telegrad.calls.collective_view import KnownView, View, digest_of
from telegrad.connection.worker_record import WorkerRecord
from telegrad.errors import AuthenticationError, CallCancelled, DeadlineExceeded, GroupsDiffer, PayloadError, WorkerLost
from telegrad.settings import AgentSettings
from telegrad.testing.group import local_group


def view_of(agent: Agent) -> View:
    return tuple((record.name, record.generation, record.incarnation) for record in agent.peers.records())


def test_the_root_gets_its_reply_last_because_it_may_leave_then() -> None:
    with local_group(["a", "b", "c"]) as agents:
        root, view = agents["a"].collectives.node, view_of(agents["a"])
        key = Round("user", 1, digest_of(view))
        replies: list[str] = []
        for name in ("a", "c", "b"):  # the root itself arrives first
            respond = partial(lambda name, values, error: replies.append(name), name)
            root.arrive(respond, Arrival(key, KnownView(view), name, None, None, whole=True, oldest=1))
        assert replies == ["c", "b", "a"]


@pytest.mark.parametrize(
    ("error", "kind"),
    [(AuthenticationError("no proof"), AuthenticationError), (RuntimeError("no pickle"), PayloadError)],
)
def test_all_below_learn_why_values_cannot_be_passed_on(error: Exception, kind: type[Exception]) -> None:
    with local_group(["a", "b", "c"], settings=AgentSettings(fan_out=1)) as agents:
        node, known = agents["b"].collectives.node, KnownView(view_of(agents["b"]))
        node._call_up = lambda to, arguments, done: done(None, error)
        key, answers = Round("user", 1, digest_of(known.view)), []
        for name in ("b", "c"):
            node.arrive(
                lambda values, error: answers.append(error),
                Arrival(key, known, name, None, None, whole=True, oldest=1),
            )
        assert [type(answer) for answer in answers] == [kind, kind]
        assert str(answers[0]) == f"worker 'b' could not pass on the values of a collective: {error}"


def test_a_collective_that_failed_keeps_nothing_while_the_call_to_the_member_above_goes_on() -> None:
    with local_group(["a", "b", "c"], settings=AgentSettings(fan_out=1)) as agents:
        node, known = agents["b"].collectives.node, KnownView(view_of(agents["b"]))
        calls: list[object] = []
        node._call_up = lambda to, arguments, done: calls.append(done)  # it does not end
        key, value = Round("user", 1, digest_of(known.view)), {1, 2}

        def respond(values: object, error: Exception | None) -> None:
            pass

        responses = [weakref.ref(respond), weakref.ref(value)]
        node.arrive(respond, Arrival(key, known, "b", value, None, whole=True, oldest=1))
        node.fail(key, known, WorkerLost("worker 'c' is gone"))
        del respond, value
        assert calls
        assert [response() for response in responses] == [None, None]


# -- members that know another group ----------------------------------------------------------------------------------


class Member:
    """A member of collectives of a root, which keeps the answers that it gets."""

    def __init__(self, agent: Agent, name: str) -> None:
        self.root: CollectiveNode = agent.collectives.node
        self.name = name
        self.answers: list[Any] = []

    def come(self, view: View, number: int = 1, *, whole: bool = True, oldest: int = 0, timeout: float = 0.0) -> None:
        key = Round("user", number, digest_of(view))
        arrival = Arrival(key, KnownView(view), self.name, self.name, timeout, whole, oldest or number)
        self.root.arrive(lambda values, error: self.answers.append(error or values), arrival)


@pytest.fixture
def root() -> Iterator[Agent]:
    with local_group(["a", "b", "c"]) as agents:
        yield agents["a"]


def replaced(record: WorkerRecord) -> WorkerRecord:
    return msgspec.structs.replace(record, generation=record.generation + 1, incarnation=record.incarnation ^ 1)


def test_whoever_waits_when_a_member_is_replaced_gets_worker_lost(root: Agent) -> None:
    view, a, b = view_of(root), Member(root, "a"), Member(root, "b")
    a.come(view)
    b.come(view, whole=False)
    root.peers.learn(replaced(root.peers.find("c").record))
    assert [type(error) for error in a.answers + b.answers] == [WorkerLost, WorkerLost]
    assert a.answers[0].worker == "c"


def test_a_member_with_an_outdated_view_gets_worker_lost_even_if_the_replaced_worker_had_come(root: Agent) -> None:
    view, b, c = view_of(root), Member(root, "b"), Member(root, "c")
    c.come(view)
    root.peers.learn(replaced(root.peers.find("c").record))
    b.come(view)
    assert isinstance(b.answers[0], WorkerLost)
    assert "was replaced" in str(b.answers[0]) or "is gone" in str(b.answers[0])


def test_a_round_with_the_replacement_begins_at_one_and_knows_nothing_of_the_rounds_before(root: Agent) -> None:
    before = view_of(root)
    members = [Member(root, name) for name in ("a", "b", "c")]
    for number in range(1, 4):
        for member in members:
            member.come(before, number)
    root.peers.learn(replaced(root.peers.find("b").record))
    for member in members:
        member.come(view_of(root), 1)
    assert [len(member.answers) for member in members] == [4, 4, 4]
    assert members[0].answers[-1] == {"a": "a", "b": "b", "c": "c"}


def test_a_root_waits_for_news_of_a_replacement_that_a_member_knows(root: Agent) -> None:
    record = replaced(root.peers.find("c").record)
    ahead = (*view_of(root)[:2], (record.name, record.generation, record.incarnation))
    members = [Member(root, name) for name in ("b", "c", "a")]
    members[0].come(ahead)
    assert members[0].answers == []
    root.peers.learn(record)
    for member in members[1:]:
        member.come(ahead)
    assert [member.answers for member in members] == [[{"a": "a", "b": "b", "c": "c"}]] * 3


def test_a_worker_that_joins_ends_collectives_of_the_whole_group(root: Agent) -> None:
    view, b, c = view_of(root), Member(root, "b"), Member(root, "c")
    root.peers.set_group(root.peers.records(), is_open=True)
    b.come(view)
    c.come(view, whole=False)
    newcomer = msgspec.structs.replace(root.me, name="n", id=9, incarnation=5)
    root.peers.learn(newcomer)
    root.collectives.node.group_changed()
    assert [type(error) for error in b.answers] == [GroupsDiffer]
    assert str(b.answers[0]).startswith("worker 'n' joined the group while worker")
    b.come(view_of(root))
    assert len(b.answers) == 1, "it waits for the newcomer, too"


# -- rounds that fail -------------------------------------------------------------------------------------------------


def test_whoever_comes_to_a_round_that_timed_out_gets_the_same_error(root: Agent) -> None:
    view, b, c = view_of(root), Member(root, "b"), Member(root, "c")
    b.come(view, timeout=0.01)
    while not b.answers:
        root.executor.wait(root.runtime.event(), root.runtime.now() + 0.01)
    assert isinstance(b.answers[0], DeadlineExceeded)
    c.come(view)
    assert c.answers == b.answers
    c.come(view, 2)
    assert len(c.answers) == 1


def test_a_member_in_a_later_round_will_not_come_to_an_earlier_one(root: Agent) -> None:
    view, a, b, c = view_of(root), Member(root, "a"), Member(root, "b"), Member(root, "c")
    a.come(view, 1)
    b.come(view, 2, oldest=1)  # another thread of b is still to come to the first
    assert a.answers == []
    c.come(view, 2)
    assert [type(error) for error in a.answers] == [CallCancelled]
    assert "worker 'c' gave up" in str(a.answers[0])
    b.come(view, 1)
    assert b.answers == a.answers


def test_only_so_many_failed_rounds_are_remembered(root: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collective_node, "_MAX_REMEMBERED", 3)
    b = Member(root, "b")
    for generation in range(-10, -1):  # replaced workers
        view = tuple((name, generation, 1) for name, _, _ in view_of(root))
        b.come(view)
    assert [type(error) for error in b.answers] == [WorkerLost] * 9
    assert len(root.collectives.node._failed) == 3
    assert not root.collectives.node._pending
