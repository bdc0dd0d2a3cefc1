"""Digests that stand for the members of a collective."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from telegrad.agent.agent import Agent
from telegrad.calls import collective_view
from telegrad.calls.collective_view import KnownViews, current_view, digest_of
from telegrad.testing.group import local_group


@pytest.fixture
def agents() -> Iterator[dict[str, Agent]]:
    with local_group(["a", "b", "c"]) as agents:
        yield agents


def test_every_part_of_a_view_changes_its_digest() -> None:
    views = [(("a", 0, 1), ("b", 0, 2)), (("a", 0, 2), ("b", 0, 1)), (("a", 1, 1), ("b", 0, 2)), (("ab", 0, 1),), ()]
    assert len({digest_of(view) for view in views}) == len(views)


def test_the_view_of_the_whole_group_is_known_without_being_sent(agents: dict[str, Agent]) -> None:
    view = current_view(agents["b"].peers)
    known = KnownViews(agents["a"].peers).find(digest_of(view))
    assert known is not None
    assert known.view == view
    assert known.incarnations == {name: agent.me.incarnation for name, agent in agents.items()}


def test_another_view_must_be_sent_once(agents: dict[str, Agent]) -> None:
    views, view = KnownViews(agents["a"].peers), current_view(agents["a"].peers)[1:]
    assert views.find(digest_of(view)) is None
    assert views.add(digest_of(view), view) is not None
    known = views.find(digest_of(view))
    assert known is not None
    assert known.view == view


def test_a_view_that_cannot_be_is_refused(agents: dict[str, Agent]) -> None:
    views, view = KnownViews(agents["a"].peers), current_view(agents["a"].peers)
    assert views.add(digest_of(view[1:]), view) is None, "another digest"
    twice = (*view, view[0])
    assert views.add(digest_of(twice), twice) is None, "a member twice"
    unknown = (*view, ("stranger", 0, 1))
    assert views.add(digest_of(unknown), unknown) is None


def test_workers_that_are_gone_belong_to_the_view_of_a_fixed_group_only(agents: dict[str, Agent]) -> None:
    peers = agents["a"].peers
    peers.lost_workers.peer_lost(peers.find("b"), "test")
    assert [name for name, _, _ in current_view(peers)] == ["a", "b", "c"]
    peers.members.form(peers.records(), is_open=True)
    assert [name for name, _, _ in current_view(peers)] == ["a", "c"]


def test_only_so_many_views_are_remembered(agents: dict[str, Agent], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collective_view, "_MAX_KNOWN", 2)
    views, view = KnownViews(agents["a"].peers), current_view(agents["a"].peers)
    others = [view[:1], view[:2], view[1:]]
    for other in others:
        views.add(digest_of(other), other)
    assert [views.find(digest_of(other)) is not None for other in others] == [False, True, True]


def test_a_collective_of_some_workers_sends_their_names_once(
    agents: dict[str, Agent], monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = []
    call = agents["c"].collectives._call

    def count(to: str, function: str, args: tuple[object, ...], **rest: object) -> object:
        sent.append(len(args))
        return call(to, function, args, **rest)

    monkeypatch.setattr(agents["c"].collectives, "_call", count)
    for _ in range(3):
        first = agents["b"].begin("b", _gather_as, ("b",))
        assert agents["c"].gather("c", ["b", "c"]) == {"b": "b", "c": "c"}
        assert agents["b"].client.complete(first) == {"b": "b", "c": "c"}
    assert sorted(sent) in ([8, 8, 8, 9], [8, 8, 8]), "the other member may have sent them"


def _gather_as(name: str) -> dict[str, object]:
    from telegrad.default_agent import default_agent

    return default_agent().gather(name, ["b", "c"])
