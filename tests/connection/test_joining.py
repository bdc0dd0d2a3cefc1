"""A worker that was killed takes its place again: with a launcher at once, otherwise with the votes of a quorum."""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from telegrad.connection.joining import probe
from telegrad.errors import NotAMember, WorkerLost
from telegrad.protocol.membership import State
from telegrad.testing.simulation import JOIN_TIMEOUT, Simulation


def run(names: str, program: Callable[[Simulation], Any], seed: int = 1) -> Any:
    with Simulation(seed, list(names)) as sim:
        return sim.run(lambda: program(sim))


def call_all(sim: Simulation, names: Sequence[str]) -> None:
    for caller in names:
        for callee in names:
            assert sim[caller].call(callee, operator.add, (1, 2)) == 3


@pytest.mark.parametrize("vouched", [True, False])
@pytest.mark.parametrize("name", ["a", "b", "c"])
def test_a_killed_worker_is_replaced_and_everybody_can_call_it(name: str, vouched: bool) -> None:
    def program(sim: Simulation) -> None:
        call_all(sim, "abc")
        sim.kill(name)
        sim.restart(name, vouched=vouched)
        call_all(sim, "abc")
        for agent in sim.agents.values():
            member = agent.peers.members.find(name)
            assert member is not None
            assert (member.state, member.identity.generation) == (State.ALIVE, 1)

    run("abc", program)


def test_a_worker_is_replaced_any_number_of_times() -> None:
    def program(sim: Simulation) -> None:
        for round_ in range(5):
            for name in "abc":
                sim.kill(name)
                sim.restart(name, vouched=(round_ % 2 == 0))
                call_all(sim, "abc")

    run("abc", program)


def test_all_but_one_may_be_replaced_at_once_by_a_launcher() -> None:
    def program(sim: Simulation) -> None:
        for name in "abc":
            sim.kill(name)
        for name in "abc":
            sim.restart(name)
        call_all(sim, "abcd")

    run("abcd", program)


def test_a_newcomer_without_a_quorum_is_told_who_does_not_agree() -> None:
    def program(sim: Simulation) -> None:
        call_all(sim, "abc")
        sim.kill("b")
        sim.kill("c")
        began = sim.scheduler.now
        with pytest.raises(NotAMember, match=r"1 of 3 workers agree, and more than half.*worker 'c': it does not"):
            sim.restart("b", vouched=False)
        assert sim.scheduler.now - began < JOIN_TIMEOUT + 5

    run("abc", program)


def test_worker_0_may_admit_a_new_worker_1_but_not_the_other_way_round() -> None:
    def second(sim: Simulation) -> None:
        sim.kill("b")
        sim.restart("b", vouched=False)
        call_all(sim, "ab")

    def first(sim: Simulation) -> None:
        sim.kill("a")
        with pytest.raises(NotAMember, match="1 of 2 workers agree"):
            sim.restart("a", vouched=False)

    run("ab", second)
    run("ab", first)


def test_a_worker_that_is_alive_is_not_replaced_by_votes(caplog: pytest.LogCaptureFixture) -> None:
    def program(sim: Simulation) -> None:
        call_all(sim, "abc")
        original = sim.agents["b"]
        listener = sim.network.listeners.pop("memory://b")
        agent = sim._make("b")
        sim.network.listeners["memory://b"] = listener
        members = [each.me for each in sim.agents.values()]
        with pytest.raises(NotAMember, match="worker 'a': another process is worker 'b', and it is alive"):
            agent.join(members, deadline=sim.scheduler.now + 10)
        agent.close()
        assert sim["a"].call("b", operator.add, (1, 2)) == 3
        assert original.peers.find("a").gone == ""

    with caplog.at_level(logging.WARNING, "telegrad"):
        run("abc", program)
    assert "worker 'b' waits to take its place in the group: 0 of 3 workers agree" in caplog.text


def test_a_worker_that_was_replaced_learns_it() -> None:
    def program(sim: Simulation) -> None:
        call_all(sim, "abc")
        for other in "ac":
            sim.network.part("b", other)
        old = sim.agents.pop("b")
        sim.network.listeners.pop("memory://b")
        sim.network.heal()
        sim.restart("b")
        assert sim["a"].call("b", operator.add, (1, 2)) == 3
        with pytest.raises(WorkerLost, match="was replaced by a later one"):
            old.call("a", operator.add, (1, 2))
        old.close()

    run("abc", program)


def test_a_worker_can_be_probed() -> None:
    def program(sim: Simulation) -> list[str]:
        me, target = sim["a"], sim["b"].me
        said = [probe(me.peers, me.me, target, sim.scheduler.now + 1)]
        sim["b"].local.departing = True
        said.append(probe(me.peers, me.me, target, sim.scheduler.now + 1))
        sim.kill("b")
        said.append(probe(me.peers, me.me, target, sim.scheduler.now + 1))
        return said

    assert run("ab", program) == ["alive", "leaving", "gone"]


def test_workers_join_an_open_group_through_any_member() -> None:
    def program(sim: Simulation) -> None:
        agents = {}
        for number, name in enumerate("xyz"):
            sim._names.append(name)
            agents[name] = sim._make(name)
            if number == 0:
                agents[name].start([agents[name].me], is_open=True)
            else:
                agents[name].join([agents["x"].me], deadline=sim.scheduler.now + 10, is_open=True)
        for caller in agents.values():
            for callee in agents:
                assert caller.call(callee, operator.add, (1, 2)) == 3
        for agent in agents.values():
            agent.close()

    run("a", program)


@pytest.mark.parametrize("seed", range(20))
def test_of_two_processes_that_want_one_place_one_gets_it(seed: int) -> None:
    def program(sim: Simulation) -> None:
        call_all(sim, "abc")
        sim.kill("b")
        sim.network.dead.discard("memory://b")
        members = list(sim._records.values())
        ended: list[str] = []
        contenders = []
        for number in range(2):
            agent = sim._make("b")
            sim.network.listeners.pop("memory://b")  # each has its own address; nobody calls them here
            contenders.append(agent)

            def join(agent: Any = agent) -> None:
                try:
                    agent.join(members, deadline=sim.scheduler.now + 8)
                    ended.append("in")
                except NotAMember:
                    ended.append("out")

            sim.scheduler.start("b", f"contender {number}", join)
        sim.sleep(40)
        assert sorted(ended) == ["in", "out"]
        for agent in contenders:
            agent.close()

    run("abc", program, seed)
