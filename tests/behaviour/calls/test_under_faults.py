"""Agents call each other, nested and in both directions, on a network with losses, duplicates, cuts and partitions."""

from __future__ import annotations

from collections import Counter

import pytest

from telegrad.agent.agent import Agent
from telegrad.calls.call import current_served
from telegrad.errors import DeadlineExceeded, TelegradError, WorkerLost
from telegrad.testing.simulation import Faults, Simulation

NAMES = [f"w{i}" for i in range(8)]


class Routes:
    """Every worker serves ``@hop``, which records that it ran and calls the next worker on its route."""

    def __init__(self, sim: Simulation) -> None:
        self.sim = sim
        self.ran: Counter[str] = Counter()
        self.returned: set[str] = set()
        self.failed: dict[str, Exception] = {}
        self.keys = 0

    def prepare(self, agent: Agent) -> None:
        agent.register("hop", self.hop)

    def hop(self, key: str, route: list[str]) -> list[str]:
        self.ran[key] += 1
        served = current_served.get()
        assert served is not None
        agent = served.agent
        if not route:
            return [agent.me.name]
        return [agent.me.name, *self.call(agent, route)]

    def call(self, agent: Agent, route: list[str], timeout: float | None = None) -> list[str]:
        self.keys += 1
        key = f"call {self.keys}"
        try:
            result: list[str] = agent.call(route[0], "@hop", (key, route[1:]), {}, timeout=timeout)
        except TelegradError as error:
            self.failed[key] = error
            raise
        assert result == route
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
    routes = Routes(sim)
    # Drawn from the simulation's own generator, so a seed determines everything.
    draw = sim.random
    faults.drop, faults.duplicate, faults.cut = draw.choice([(0, 0, 0), (0.01, 0.02, 0.01), (0, 0, 0.03), (0.03, 0, 0)])
    killed, parted = draw.random() < 0.3, draw.random() < 0.3
    calm = not (killed or parted or faults.drop or faults.cut)

    def trip(name: str) -> None:
        for _ in range(2):
            route = [draw.choice(NAMES) for _ in range(draw.randint(1, 4))]
            timeout = draw.choice([0.02, 60.0, 60.0, 0.0])
            try:
                routes.call(sim[name], route, timeout=timeout)
            except WorkerLost:
                assert not calm, "a worker was lost on a network without faults"
            except DeadlineExceeded:
                assert not calm or timeout == 0.02, "a call was late on a network without faults"

    def program() -> None:
        for agent in sim.agents.values():
            routes.prepare(agent)
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
    routes.check()
    return {"returned": len(routes.returned), "failed": len(routes.failed), **sim.network.counts}


@pytest.mark.parametrize("block", range(20))
def test_a_function_runs_exactly_once_if_its_call_returns_and_at_most_once_if_it_fails(block: int) -> None:
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


@pytest.mark.parametrize("resumable", [False, True], ids=["unix", "tcp"])
@pytest.mark.parametrize("seed", range(20))
def test_a_killed_callee_fails_the_pending_call_within_three_seconds(seed: int, resumable: bool) -> None:
    with Simulation(seed, ["a", "b"], resumable=resumable) as sim:
        lost_at: list[float] = []

        def never_return() -> None:
            sim.sleep(3600.0)

        def call() -> None:
            with pytest.raises(WorkerLost) as caught:
                sim["a"].call("b", "@never_return", timeout=0)
            assert caught.value.worker == "b"
            lost_at.append(sim.scheduler.now)

        def program() -> None:
            sim["b"].register("never_return", never_return)
            thread = sim.spawn("a", call)
            sim.sleep(10.0)
            killed_at = sim.scheduler.now
            sim.kill("b")
            assert thread.join(killed_at + 3.0)
            assert lost_at[0] >= killed_at

        sim.run(program)
