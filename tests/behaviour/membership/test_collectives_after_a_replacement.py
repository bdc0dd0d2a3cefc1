"""Collectives and shutdowns of groups in which a worker was killed and replaced."""

from __future__ import annotations

from functools import partial
from typing import Any

import msgspec
import pytest

from telegrad import rpc
from telegrad.errors import GroupsDiffer, WorkerLost
from telegrad.testing.scheduler import SimThread
from telegrad.testing.simulation import Faults, Simulation

NAMES = ("a", "b", "c", "d")
SEEDS = range(8)


def join(threads: dict[str, SimThread], seconds: float = 120.0) -> None:
    for name, thread in threads.items():
        assert thread.join(seconds), f"{name} still waits"


@pytest.mark.parametrize("victim", ["a", "b", "d"])
@pytest.mark.parametrize("seed", SEEDS)
def test_a_replacement_takes_part_from_its_first_collective_on(seed: int, victim: str) -> None:
    """Whatever the numbers were before, and whoever was replaced, the root included."""
    with Simulation(seed=seed, workers=NAMES) as sim:
        gathered: dict[str, list[dict[str, Any]]] = {name: [] for name in NAMES}

        def gather(name: str, times: int) -> None:
            for _ in range(times):
                gathered[name].append(rpc.all_gather(f"{name}{len(gathered[name])}"))

        def program() -> None:
            join({name: sim.spawn(name, partial(gather, name, 3)) for name in NAMES})
            sim.kill(victim)
            sim.restart(victim)
            join({name: sim.spawn(name, partial(gather, name, 3)) for name in NAMES})

        sim.run(program)
        expected = [{name: f"{name}{number}" for name in NAMES} for number in range(6)]
        assert gathered == dict.fromkeys(NAMES, expected)


@pytest.mark.parametrize("victim", ["a", "b", "d"])
@pytest.mark.parametrize("faults", [Faults(), Faults(longest_delay=0.5, cut=0.02)], ids=["calm", "faulty"])
@pytest.mark.parametrize("seed", SEEDS)
def test_a_worker_that_is_replaced_at_any_time_neither_hangs_nor_mixes_rounds(
    seed: int, faults: Faults, victim: str
) -> None:
    """Members that get WorkerLost try again. Each value that is gathered belongs to the same step as all others."""
    with Simulation(seed=seed, workers=NAMES, faults=faults) as sim:
        reached: dict[str, int] = {}

        def work(name: str, steps: int = 12) -> None:
            step = 0
            while step < steps:
                sim.sleep(sim.random.random())
                try:
                    values = rpc.all_gather((name, step))
                except WorkerLost as error:
                    rpc.wait_for_worker(error.worker or victim)
                    continue
                assert set(values) == set(NAMES)
                # A replacement, or a member whose answer was lost, is behind, and catches up.
                step = max(number for _, number in values.values()) + 1
                reached[name] = step

        def program() -> None:
            threads = {name: sim.spawn(name, partial(work, name)) for name in NAMES}
            sim.sleep(2 + 2 * sim.random.random())
            sim.kill(victim)
            sim.sleep(3 * sim.random.random())
            sim.restart(victim)
            threads[victim] = sim.spawn(victim, partial(work, victim))
            join(threads, 600.0)

        sim.run(program)
        assert reached == dict.fromkeys(NAMES, 12)


@pytest.mark.parametrize("victim", ["a", "b", "d"])
@pytest.mark.parametrize("seed", SEEDS)
def test_a_group_with_a_replaced_worker_shuts_down(seed: int, victim: str) -> None:
    with Simulation(seed=seed, workers=NAMES) as sim:
        ended: list[str] = []

        def work(name: str) -> None:
            references = [rpc.remote(other, dict, ([(1, 2)],)) for other in NAMES]
            for reference in references:
                assert reference.to_here() == {1: 2}
            del references, reference
            sim[name].shutdown()
            ended.append(name)

        def program() -> float:
            everybody = {name: sim.spawn(name, partial(call_all, name)) for name in NAMES}
            join(everybody)
            sim.kill(victim)
            sim.restart(victim)
            began = sim.scheduler.now
            join({name: sim.spawn(name, partial(work, name)) for name in NAMES})
            return sim.scheduler.now - began

        assert sim.run(program) < 5.0, "it waited for messages that the replaced worker had got"
        assert sorted(ended) == list(NAMES)


def call_all(name: str) -> None:
    references = [rpc.remote(other, list, ([name],)) for other in NAMES]
    for reference in references:
        assert reference.to_here() == [name]


@pytest.mark.parametrize("victim", ["a", "b"])
@pytest.mark.parametrize("seed", SEEDS)
def test_a_shutdown_waits_for_a_worker_that_is_replaced_while_it_goes_on(
    seed: int, victim: str, caplog: pytest.LogCaptureFixture
) -> None:
    with Simulation(seed=seed, workers=NAMES) as sim:
        ended: dict[str, float] = {}

        def leave(name: str, after: float = 0.0) -> None:
            sim.sleep(after)
            sim[name].shutdown()
            ended[name] = sim.scheduler.now

        def program() -> None:
            delays = dict.fromkeys(NAMES, 0.0) | {victim: 1000.0, "c": 20.0}
            threads = {name: sim.spawn(name, partial(leave, name, delay)) for name, delay in delays.items()}
            sim.sleep(3 * sim.random.random())
            sim.kill(victim)
            sim.sleep(3 * sim.random.random())
            sim.restart(victim)
            threads[victim] = sim.spawn(victim, partial(leave, victim, 30.0))
            join(threads)

        sim.run(program)
        assert set(ended) == set(NAMES)
        assert min(ended.values()) >= 30.0, "somebody did not wait for the replacement"
    assert f"'d' has waited 30 s in shutdown() for worker {victim!r}, which has not called it" in caplog.text


def test_a_root_that_never_hears_of_a_worker_says_so() -> None:
    """As if the member that was told of a replacement was the only one."""
    with Simulation(seed=1, workers=NAMES) as sim:

        def program() -> None:
            peers = sim["b"].peers
            known = peers.all()[3].record
            peers.learn(msgspec.structs.replace(known, generation=5, incarnation=77))

            def take_part() -> None:
                with pytest.raises(GroupsDiffer, match="'b' did a collective with worker 'd', whom the worker that"):
                    rpc.barrier()

            began = sim.scheduler.now
            join({"b": sim.spawn("b", take_part)})
            assert 10.0 <= sim.scheduler.now - began < 12.0

        sim.run(program)
