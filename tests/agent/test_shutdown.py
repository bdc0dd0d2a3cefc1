"""How a worker leaves: what it still does for those that were killed, and for those that wait for its answers."""

from __future__ import annotations

import math
import time
from typing import Any

import pytest

from telegrad.errors import WorkerLost
from telegrad.testing.group import local_group
from telegrad.testing.simulation import Simulation
from telegrad.transport.memory import MemoryTransport

SEEDS = range(6)


class Listening:
    """Stands for the socket files of killed workers: they answer for some time after the connection has ended."""

    def __init__(self, seconds: float, patch: pytest.MonkeyPatch) -> None:
        self.seconds = seconds
        self.killed_at = math.inf
        self.asked = 0
        self.removed_at: float | None = None
        patch.setattr(MemoryTransport, "remove_dead", self.remove_dead)

    def run(self, seed: int, pause: float = 0.0) -> float:
        """Kill one of three workers that another has called, which then leaves; say how long leaving took."""
        sim = self.sim = Simulation(seed, ["a", "b", "c"], resumable=False)

        def program() -> float:
            call = sim["a"].begin("b", abs, (-1,))
            self.killed_at = sim.scheduler.now
            sim.kill("b")
            with pytest.raises(WorkerLost):
                sim["a"].client.complete(call)
            sim.sleep(pause)
            began = sim.scheduler.now
            sim.agents.pop("a").close()
            return sim.scheduler.now - began

        with sim:
            return sim.run(program)

    def remove_dead(self, address: str) -> bool:
        assert address == "memory://b"
        self.asked += 1
        if self.sim.scheduler.now < self.killed_at + self.seconds:
            return False
        self.removed_at = self.removed_at or self.sim.scheduler.now
        return True


@pytest.mark.parametrize("seed", SEEDS)
def test_whoever_leaves_right_after_a_death_removes_what_the_dead_left(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = Listening(0.3, monkeypatch)
    took = files.run(seed)
    assert files.removed_at is not None
    assert took < 0.9


@pytest.mark.parametrize("seed", SEEDS)
def test_a_lost_worker_that_lives_on_delays_nobody_for_long(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    files = Listening(math.inf, monkeypatch)
    assert files.run(seed) < 1.5
    assert files.asked < 20
    assert files.run(seed, pause=5.0) < 0.1


def test_a_call_counts_as_under_way_until_its_answer_has_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or a worker that leaves when all is quiet would keep the answer to itself."""
    with local_group(["a", "b"]) as group:
        b = group["b"]
        pack, seen = b.pipeline.pack, []

        def look_and_pack(*args: Any, **kwargs: Any) -> Any:
            seen.append(b.activity())
            return pack(*args, **kwargs)

        monkeypatch.setattr(b.pipeline, "pack", look_and_pack)
        assert group["a"].call("b", abs, (-1,)) == 1
        assert [len(activity) for activity in seen] == [1]
        deadline = time.monotonic() + 20
        while b.activity():
            assert time.monotonic() < deadline
