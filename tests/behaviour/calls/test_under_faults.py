"""Agents that call each other, nested and both ways, on a network that loses, repeats, cuts and parts."""

from __future__ import annotations

from collections import Counter

import pytest

from telegrad.agent.agent import Agent
from telegrad.calls.call import current_served
from telegrad.errors import DeadlineExceeded, TelegradError, WorkerLost
from telegrad.testing.simulation import Faults, Simulation

NAMES = [f"w{i}" for i in range(8)]


class Town:
    """Every worker serves ``@visit``, which notes that it ran and goes on to the next worker of its way."""

    def __init__(self, sim: Simulation) -> None:
        self.sim = sim
        self.ran: Counter[str] = Counter()
        self.returned: set[str] = set()
        self.failed: dict[str, Exception] = {}
        self.keys = 0

    def prepare(self, agent: Agent) -> None:
        agent.register("visit", self.visit)

    def visit(self, key: str, way: list[str]) -> list[str]:
        self.ran[key] += 1
        served = current_served.get()
        assert served is not None
        agent = served.agent
        if not way:
            return [agent.me.name]
        return [agent.me.name, *self.call(agent, way)]

    def call(self, agent: Agent, way: list[str], timeout: float | None = None) -> list[str]:
        self.keys += 1
        key = f"call {self.keys}"
        try:
            result: list[str] = agent.call(way[0], "@visit", (key, way[1:]), {}, timeout=timeout)
        except TelegradError as error:
            self.failed[key] = error
            raise
        assert result == way
        self.returned.add(key)
        return result

    def check(self) -> None:
        for key in self.returned:
            assert self.ran[key] == 1, f"{key} returned, but ran {self.ran[key]} times"
        for key in self.failed:
            assert self.ran[key] <= 1, f"{key} failed, and ran {self.ran[key]} times"


def _one_seed(seed: int) -> dict[str, int]:
    faults = Faults()
    sim = Simulation(seed, NAMES, faults=faults, resumable=seed % 5 != 0)
    town = Town(sim)
    # Drawn from the simulation's own source, so that a seed is the whole story.
    draw = sim.random
    faults.drop, faults.duplicate, faults.cut = draw.choice([(0, 0, 0), (0.01, 0.02, 0.01), (0, 0, 0.03), (0.03, 0, 0)])
    killed, parted = draw.random() < 0.3, draw.random() < 0.3
    calm = not (killed or parted or faults.drop or faults.cut)

    def trip(name: str) -> None:
        for _ in range(2):
            way = [draw.choice(NAMES) for _ in range(draw.randint(1, 4))]
            timeout = draw.choice([0.02, 60.0, 60.0, 0.0])
            try:
                town.call(sim[name], way, timeout=timeout)
            except WorkerLost:
                assert not calm, "a worker was lost on a network without faults"
            except DeadlineExceeded:
                assert not calm or timeout == 0.02, "a call was late on a network without faults"

    def program() -> None:
        for agent in sim.agents.values():
            town.prepare(agent)
        threads = [sim.spawn(name, lambda name=name: trip(name)) for name in NAMES]
        if killed:
            sim.sleep(draw.uniform(0.0, 0.03))
            sim.kill(victim := draw.choice(NAMES))
            threads = [thread for thread in threads if thread.node != victim]
        if parted:
            one, other = draw.sample(NAMES, 2)
            sim.network.part(one, other)
            sim.sleep(draw.uniform(0.0, 2.0))
            sim.network.heal()
        for thread in threads:
            assert thread.join(sim.scheduler.now + 600), f"{thread.node} hangs:\n{sim.scheduler.stacks()}"

    with sim:
        sim.run(program)
    town.check()
    return {"returned": len(town.returned), "failed": len(town.failed), **sim.network.counts}


@pytest.mark.parametrize("block", range(20))
def test_a_function_runs_once_per_call_that_returned_and_at_most_once_otherwise(block: int) -> None:
    total: Counter[str] = Counter()
    for seed in range(block * 25, block * 25 + 25):
        try:
            total.update(_one_seed(seed))
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
    assert total["returned"] > 25 * 10
    assert total["cuts"] > 0
    assert total["repeated"] > 0
    assert total["dropped"] > 0
