"""The place of a worker in a shutdown, as it knows the group and as others say."""

from __future__ import annotations

import pytest

from telegrad.agent.agent import Agent
from telegrad.calls.collective_messages import DETACHED, INSISTS
from telegrad.calls.shutdown_tree import ShutdownTree
from telegrad.errors import NotInitialized
from telegrad.protocol.shutdown_parents import GIVE_UP, INSIST
from telegrad.settings import AgentSettings
from telegrad.testing.group import local_group
from telegrad.testing.simulation import Simulation

MEMBERS = ("a", "b", "c", "d")


def tree_of(agent: Agent) -> ShutdownTree:
    return agent.collectives.shutdown_rounds.tree


def awaited(tree: ShutdownTree) -> set[str]:
    return set(tree.awaited(*tree.now()))


def test_a_worker_avoids_the_one_that_has_detached_it() -> None:
    with local_group(MEMBERS, settings=AgentSettings(fan_out=1)) as agents:
        d, peers = tree_of(agents["d"]), agents["d"].peers
        assert d.target() is peers.find("c")
        d.sent_away(peers.find("c"), agents["d"].runtime.now(), DETACHED)
        assert d.target() is peers.find("b")
        d.sent_away(peers.find("b"), agents["d"].runtime.now(), None)
        assert d.target() is peers.find("c")


def test_a_worker_does_not_avoid_the_root_also_if_it_became_that_later() -> None:
    with local_group(MEMBERS, settings=AgentSettings(fan_out=1)) as agents:
        c, peers = tree_of(agents["c"]), agents["c"].peers
        for name in ("b", "a"):
            c.sent_away(peers.find(name), agents["c"].runtime.now(), DETACHED)
        assert c.target() is peers.find("c"), "somebody is below it"
        assert c.above(peers.find("c")) == peers.find("a").record.id
        peers.lost_workers.peer_lost(peers.find("a"), "test")
        assert c.above(peers.find("c")) == peers.find("b").record.id


def test_a_worker_without_a_connection_to_its_parent_makes_one_before_it_names_it() -> None:
    with Simulation(1, MEMBERS) as sim:

        def program() -> None:
            assert tree_of(sim["a"]).reports_to() == -1
            assert tree_of(sim["c"]).reports_to() is None
            sim.sleep(1.0)
            assert tree_of(sim["c"]).reports_to() == sim["a"].me.id
            sim.kill("a")
            assert tree_of(sim["d"]).reports_to() is None
            sim.sleep(5.0)
            assert tree_of(sim["d"]).reports_to() is None, "the next is b"
            sim.sleep(1.0)
            assert tree_of(sim["d"]).reports_to() == sim["b"].me.id

        sim.run(program)


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
        assert not a.said(c.incarnation, None)
        assert not a.doubtful, "it does not know"
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
