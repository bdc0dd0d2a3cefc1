"""Workers that do not know all others are named, and one that hears of them in time is waited for."""

from __future__ import annotations

from telegrad.default_agent import acting_as
from telegrad.recovery.agreement import unknown_to_others
from telegrad.testing.simulation import Simulation


def incarnations(sim: Simulation) -> dict[str, int]:
    return {name: agent.me.incarnation for name, agent in sim.agents.items()}


def test_all_workers_of_a_group_know_each_other() -> None:
    with Simulation(1, ["a", "b", "c"]) as sim:

        def program() -> None:
            with acting_as(sim["a"]):
                assert unknown_to_others(incarnations(sim), 2.0) == {}

        sim.run(program)


def test_a_worker_that_has_lost_another_one_is_named() -> None:
    with Simulation(1, ["a", "b", "c"]) as sim:

        def program() -> None:
            b, c = sim["b"].peers, sim["c"].me
            b.lost_workers.peer_lost(b.find(c.name), "for a test")
            with acting_as(sim["a"]):
                began = sim["a"].runtime.now()
                assert unknown_to_others(incarnations(sim), 2.0) == {"b": ["c"]}
                assert sim["a"].runtime.now() - began >= 2.0

        sim.run(program)


def test_a_replacement_that_comes_in_time_is_known() -> None:
    with Simulation(1, ["a", "b", "c"]) as sim:

        def program() -> None:
            sim.kill("c")
            sim.restart("c")
            after = incarnations(sim)
            before = {**after, "c": after["c"] + 1}  # one that never comes
            with acting_as(sim["a"]):
                assert unknown_to_others(after, 10.0) == {}
                assert unknown_to_others(before, 1.0) == {name: ["c"] for name in "abc"}

        sim.run(program)
