"""The rounds of a graceful shutdown: they go on whoever is lost, and count every worker once."""

from __future__ import annotations

import itertools
import operator

import msgspec
import pytest

from telegrad.agent.agent import Agent
from telegrad.calls.collective_messages import Stage
from telegrad.connection.worker_record import WorkerRecord
from telegrad.protocol.shutdown_report import report_of, to_plain
from telegrad.settings import AgentSettings
from telegrad.testing.group import local_group
from telegrad.testing.simulation import Simulation

MEMBERS = ("a", "b", "c", "d")


class Asked:
    """A member that asks a root for rounds of a shutdown, and keeps the answers."""

    def __init__(self, root: Agent) -> None:
        self.root = root
        self.answers: list[tuple[str, int, object]] = []

    def ask(self, name: str, number: int, record: WorkerRecord | None = None) -> None:

        def respond(values: object, error: Exception | None) -> None:
            assert error is None
            self.answers.append((name, number, values))

        worker = record or self.root.peers.find(name).record
        idle = report_of(worker.id, busy=False, calls=0, pending=False, sent={}, received={})
        rounds = self.root.collectives.shutdown_rounds
        rounds.arrive(respond, name, worker.incarnation, number, Stage.VALUE, to_plain(idle))


def test_a_new_root_does_not_wait_for_a_round_that_some_members_have_completed() -> None:
    with local_group(MEMBERS) as agents:
        asked, peers = Asked(agents["b"]), agents["b"].peers
        peers.lost_workers.peer_lost(peers.find("a"), "test")
        asked.ask("b", 3)
        asked.ask("c", 3)
        assert asked.answers == [], "they wait for d"
        asked.ask("d", 4)
        assert sorted(asked.answers) == [("b", 3, {}), ("c", 3, {})], "d has the result of round 3, so it is over"
        asked.answers.clear()
        asked.ask("c", 2)
        assert asked.answers == [("c", 2, {})]
        asked.answers.clear()
        for name in ("b", "c"):
            asked.ask(name, 4)
        assert sorted(asked.answers) == [(name, 4, (False, 0, True)) for name in MEMBERS[1:]]
        asked.answers.clear()
        asked.ask("c", 4)
        assert asked.answers == [("c", 4, (False, 0, True))], "its answer may have been lost with its parent"


def test_whoever_is_not_a_child_is_sent_away_until_its_parent_is_lost() -> None:
    with local_group(MEMBERS) as agents:
        asked, peers = Asked(agents["b"]), agents["b"].peers
        asked.ask("c", 1)
        assert asked.answers == [("c", 1, None)], "a is alive, and c has to ask it"
        peers.lost_workers.peer_lost(peers.find("a"), "test")
        asked.ask("c", 1)
        assert len(asked.answers) == 1


def test_those_of_a_lost_parent_are_sent_away_when_it_was_replaced() -> None:
    with local_group(MEMBERS) as agents:
        asked, peers = Asked(agents["b"]), agents["b"].peers
        record = peers.find("a").record
        peers.lost_workers.peer_lost(peers.find("a"), "test")
        asked.ask("c", 1)
        asked.ask("d", 1)
        assert asked.answers == []
        peers.learn(msgspec.structs.replace(record, generation=1, incarnation=record.incarnation ^ 1))
        agents["b"].collectives.shutdown_rounds.look()
        assert sorted(asked.answers) == [("c", 1, None), ("d", 1, None)]


@pytest.mark.parametrize("is_noticed", [False, True])
def test_a_worker_that_died_does_not_speak_for_its_replacement(is_noticed: bool) -> None:
    with local_group(MEMBERS, settings=AgentSettings(awaited_replacement=60.0)) as agents:
        asked, peers = Asked(agents["a"]), agents["a"].peers
        before = peers.find("b").record
        asked.ask("b", 1)
        peers.lost_workers.peer_lost(peers.find("b"), "test")
        if is_noticed:
            asked.ask("c", 1)
        peers.learn(msgspec.structs.replace(before, generation=1, incarnation=before.incarnation ^ 1))
        asked.answers.clear()
        for name in ("a", "c", "d"):
            asked.ask(name, 1)
        asked.ask("b", 1, before)  # a message that was on its way
        assert asked.answers == [("b", 1, None)], "the others wait for the new one"
        asked.ask("b", 1)
        assert {name for name, _, _ in asked.answers} == set(MEMBERS)


@pytest.mark.parametrize("fan_out", [1, 2, 3])
@pytest.mark.parametrize("seed", range(8))
def test_a_shutdown_ends_whoever_is_killed_meanwhile(seed: int, fan_out: int) -> None:
    names = [f"w{number}" for number in range(9)]
    with Simulation(seed=seed, workers=names, settings=AgentSettings(fan_out=fan_out)) as sim:

        def program() -> None:
            victims = sim.random.sample(names, sim.random.randint(0, 4))
            threads = {name: sim.spawn(name, lambda name=name: sim[name].shutdown()) for name in names}
            for victim in victims:
                sim.sleep(sim.random.choice((0.0, 0.003, 0.02, 0.3)))
                if not sim[victim].closed:
                    sim.kill(victim)
            for name, thread in threads.items():
                assert name in victims or thread.join(600.0), f"{name} still waits"

        sim.run(program)


@pytest.mark.parametrize("fan_out", [1, 2, 3])
@pytest.mark.parametrize("seed", range(6))
def test_a_shutdown_ends_if_two_workers_have_lost_each_other_and_others_have_not(seed: int, fan_out: int) -> None:
    names = [f"w{number}" for number in range(8)]
    with Simulation(seed=seed, workers=names, settings=AgentSettings(fan_out=fan_out)) as sim:

        def program() -> None:
            pairs = [sim.random.sample(range(8), 2) for _ in range(sim.random.randint(1, 3))]
            pairs.append([3, 2] if fan_out == 1 else [1, 0])  # an inner one and its parent
            for one, other in pairs:
                sim.network.part(sim.place_of(names[one]), sim.place_of(names[other]))
            threads = {name: sim.spawn(name, lambda name=name: sim[name].shutdown()) for name in names}
            for name, thread in threads.items():
                assert thread.join(600.0), f"{name} still waits"

        sim.run(program)


@pytest.mark.parametrize("fan_out", [1, 2, 3])
@pytest.mark.parametrize("seed", range(5))
def test_a_shutdown_ends_whichever_workers_have_lost_each_other(seed: int, fan_out: int) -> None:
    names = [f"w{number}" for number in range(8)]
    with Simulation(seed=seed, workers=names, settings=AgentSettings(fan_out=fan_out)) as sim:

        def program() -> None:
            pairs = list(itertools.combinations(names, 2))
            lost = sim.random.sample(pairs, sim.random.randint(3, 18))
            for one, other in lost:  # at once, as after a partition that has healed since
                for here, there in ((one, other), (other, one)):
                    peers = sim[here].peers
                    peers.lost_workers.peer_lost(peers.find(there), "test")
            threads = {name: sim.spawn(name, lambda name=name: sim[name].shutdown()) for name in names}
            for name, thread in threads.items():
                assert thread.join(600.0), f"{name} still waits"

        sim.run(program)


@pytest.mark.parametrize("seed", range(5))
def test_a_shutdown_waits_for_calls_anywhere_in_the_tree(seed: int) -> None:
    names = [f"w{number}" for number in range(8)]
    with Simulation(seed=seed, workers=names, settings=AgentSettings(fan_out=2)) as sim:
        results: list[int] = []

        def busy() -> None:
            sim.sleep(5.0)
            results.append(sim["w7"].call("w6", operator.add, (1, 2)))
            sim["w7"].shutdown()

        def program() -> None:
            threads = [sim.spawn(name, lambda name=name: sim[name].shutdown()) for name in names[:-1]]
            threads.append(sim.spawn("w7", busy))
            for thread in threads:
                assert thread.join(60.0), f"{thread.node} still waits"

        sim.run(program)
        assert results == [3]


@pytest.mark.parametrize("dead", ["w0", "w3"])
def test_a_shutdown_waits_for_a_worker_that_has_not_noticed_a_death_yet(dead: str) -> None:
    """It has a program to run, and no connection with the dead one, to which it would report."""
    names = [f"w{number}" for number in range(8)]
    fan_out = 2 if dead == "w3" else 16
    with Simulation(seed=1, workers=names, settings=AgentSettings(fan_out=fan_out)) as sim:
        results: list[int] = []

        def busy() -> None:
            sim.sleep(100.0)
            results.append(sim["w7"].call("w2", operator.add, (1, 2)))
            sim["w7"].shutdown()

        def program() -> None:
            sim["w1"].call(dead, abs, (-1,))
            sim.kill(dead)
            threads = [sim.spawn(name, lambda name=name: sim[name].shutdown()) for name in names[:-1] if name != dead]
            threads.append(sim.spawn("w7", busy))
            for thread in threads:
                assert thread.join(200.0), f"{thread.node} still waits"

        sim.run(program)
        assert results == [3]


@pytest.mark.parametrize("knows", ["w1", "w2"])
def test_nobody_leaves_alone_because_its_parent_learns_of_a_death_at_another_time(knows: str) -> None:
    with Simulation(seed=1, workers=["w0", "w1", "w2"], settings=AgentSettings(fan_out=1)) as sim:
        results: list[int] = []

        def busy() -> None:
            sim.sleep(100.0)
            results.append(sim["w1"].call("w2", operator.add, (1, 2)))
            sim["w1"].shutdown()

        def program() -> None:
            for name in ("w1", "w2"):  # a machine that went down
                sim.network.part("w0", name)
            sim.kill("w0")
            peers = sim[knows].peers
            peers.lost_workers.peer_lost(peers.find("w0"), "test")
            for thread in (sim.spawn("w2", sim["w2"].shutdown), sim.spawn("w1", busy)):
                assert thread.join(200.0), f"{thread.node} still waits"

        sim.run(program)
        assert results == [3]


def test_a_root_that_is_closing_answers_nobody() -> None:
    with local_group(MEMBERS) as agents:
        asked = Asked(agents["a"])
        for name in MEMBERS[1:]:
            asked.ask(name, 1)
        agents["a"].close()
        assert asked.answers == []
