"""Objects that only their worker knows are part of snapshots under a name."""

from __future__ import annotations

from typing import Any

import torch

import telegrad
from telegrad import recovery
from telegrad.default_agent import acting_as
from telegrad.testing.simulation import Simulation


class Counter:
    """Counts, and can be saved."""

    def __init__(self) -> None:
        self.count = 0

    def add(self) -> int:
        self.count += 1
        return self.count

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


def serve(sim: Simulation, name: str) -> None:
    counter = Counter()
    with acting_as(sim[name]):
        recovery.keep("counter", counter)
        telegrad.register("add", counter.add)


def test_a_kept_object_of_a_replaced_worker_gets_its_state_when_it_is_there() -> None:
    with Simulation(1, ["driver", "b"]) as sim, torch.random.fork_rng(devices=[]):

        def program() -> Any:
            serve(sim, "b")
            counts: dict[int, int] = {}
            with acting_as(sim["driver"]):
                training = recovery.Training(lambda: None, every=4)
                for step in training.steps(10):
                    with training:
                        if step == 9 and not training.recoveries:
                            sim.kill("b")
                            sim.scheduler.start("launcher", "restart", restart)
                        counts[step] = telegrad.rpc_sync("b", "@add")
            return counts, training.recoveries

        def restart() -> None:
            sim.sleep(3.0)
            sim.restart("b")
            sim.sleep(2.0)  # the training waits for what is not kept yet
            serve(sim, "b")

        counts, recoveries = sim.run(program)
    assert counts == {step: step + 1 for step in range(10)}
    assert [(each.workers, each.step) for each in recoveries] == [(("b",), 9)]
    assert recoveries[0].resumed in (4, 8), "or a new counter would be as good as the saved one"
