"""The place of a worker in a shutdown, as it knows the group and as others say."""

from __future__ import annotations

import pytest

from telegrad.agent.agent import Agent
from telegrad.calls.collective_messages import DETACHED, INSISTS
from telegrad.calls.shutdown_tree import ShutdownTree
from telegrad.errors import NotInitialized
from telegrad.protocol.shutdown_parents import GIVE_UP, INSIST
from telegrad.testing.group import local_group

MEMBERS = ("a", "b", "c", "d")


def tree_of(agent: Agent) -> ShutdownTree:
    return agent.collectives.shutdown_rounds.tree


def awaited(tree: ShutdownTree) -> set[str]:
    return set(tree.awaited(*tree.now()))


def test_a_worker_avoids_the_one_that_has_detached_it() -> None:
    with local_group(MEMBERS) as agents:
        c, peers = tree_of(agents["c"]), agents["c"].peers
        assert c.target() is peers.find("a")
        c.sent_away(peers.find("a"), agents["c"].runtime.now(), DETACHED)
        assert c.target() is peers.find("b")
        assert c.reports_to() == peers.find("b").record.id
        c.sent_away(peers.find("b"), agents["c"].runtime.now(), None)
        assert c.target() is peers.find("a")


def test_a_worker_that_is_sent_away_for_long_says_that_it_insists() -> None:
    with local_group(MEMBERS) as agents:
        b, a = tree_of(agents["b"]), agents["b"].peers.find("a")
        assert b.above(a) == -1, "a is the root"
        now = agents["b"].runtime.now()
        b.sent_away(a, now - INSIST + 0.1, None)
        assert b.above(a) == -1
        b.sent_away(a, now - 2 * INSIST, None)  # had been taken for so long
        assert b.above(a) == -1
        b._parents._away_since = now - INSIST
        assert b.above(a) == INSISTS


def test_those_who_insist_are_awaited_and_those_who_report_elsewhere_are_not() -> None:
    with local_group(MEMBERS) as agents:
        a, peers = tree_of(agents["a"]), agents["a"].peers
        assert awaited(a) == {"a", "b", "c", "d"}
        c = peers.find("c").record
        assert not a.said(c.incarnation, peers.find("b").record.id)
        assert a.doubtful
        a._parents._strayed[c.incarnation] -= GIVE_UP
        assert a.said(c.incarnation, peers.find("b").record.id)
        assert awaited(a) == {"a", "b", "d"}
        a.came("c", insists=False)
        assert awaited(a) == {"a", "b", "c", "d"}

        b = tree_of(agents["b"])
        assert awaited(b) == {"b"}
        agents["c"].call("b", len, ("x",))
        b.came("c", insists=True)
        assert awaited(b) == {"b", "c"}
        of_b = agents["b"].peers
        of_b.lost_workers.peer_lost(of_b.find("c"), "test")
        assert awaited(b) == {"b"}


def test_a_closed_worker_reports_to_nobody() -> None:
    with local_group(MEMBERS) as agents:
        agents["b"].close()
        with pytest.raises(NotInitialized):
            tree_of(agents["b"]).target()
