"""What blocked directions, half-open connections and reordered lanes do to frames."""

from __future__ import annotations

import operator

import pytest

from telegrad.errors import WorkerLost
from telegrad.testing.universe.network import UniverseSimulation


def test_a_blocked_direction_keeps_frames_until_it_is_unblocked() -> None:
    with UniverseSimulation(1, ["a", "b"]) as sim:

        def program() -> float:
            assert sim["a"].call("b", operator.add, (1, 2)) == 3
            sim.network.block("a", "b")
            thread = sim.spawn("a", lambda: sim["a"].call("b", operator.add, (3, 4)))
            sim.sleep(4.0)
            assert not thread.ended.is_set()
            sim.network.unblock("a", "b")
            assert thread.join(sim.scheduler.now + 1.0)
            return sim.scheduler.now

        assert 4.0 <= sim.run(program) < 5.0
        assert sim.network.counts["cuts"] == 0


def test_nobody_can_connect_through_a_blocked_direction_and_the_worker_is_lost() -> None:
    with UniverseSimulation(1, ["a", "b"]) as sim:

        def program() -> None:
            sim.network.block("b", "a")  # the answer would not arrive
            with pytest.raises(WorkerLost):
                sim["a"].call("b", operator.add, (1, 2), timeout=0)
            assert 30.0 <= sim.scheduler.now < 45.0

        sim.run(program)


def test_a_connection_that_is_cut_half_open_is_resumed() -> None:
    with UniverseSimulation(2, ["a", "b"]) as sim:

        def program() -> None:
            assert sim["a"].call("b", operator.add, (1, 2)) == 3
            (link,) = sim.network.between("a", "b")
            sim.network.cut_half_open(link, 2.0)
            assert sim["a"].call("b", operator.add, (3, 4)) == 7

        sim.run(program)
        assert sim.network.counts["cuts"] == 1


def test_small_messages_overtake_large_ones_where_lanes_reorder() -> None:
    def in_order(reorders: bool, seed: int) -> bool:
        arrived: list[int] = []
        with UniverseSimulation(seed, ["a", "b"]) as sim:
            sim.network.reorders = reorders
            sim.network.faults.longest_delay = 0.05

            def program() -> None:
                sim["b"].register("take", lambda load: arrived.append(len(load)))
                sim["a"].call("b", "@take", (b"",))
                arrived.clear()
                calls = [sim["a"].begin("b", "@take", (bytes(size),)) for size in (200_000, 1)]
                for call in calls:
                    sim["a"].wait(call)

            sim.run(program)
        return arrived == [200_000, 1]

    assert all(in_order(False, seed) for seed in range(10))
    assert not all(in_order(True, seed) for seed in range(10))
