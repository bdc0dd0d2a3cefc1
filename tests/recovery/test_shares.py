"""Objects that only their worker knows are part of snapshots under a name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import telegrad
from telegrad import recovery
from telegrad.default_agent import acting_as
from telegrad.errors import RecoveryFailed
from telegrad.recovery import files, shares
from telegrad.recovery.shares import Run, SnapshotId
from telegrad.recovery.snapshots import Snapshots
from telegrad.recovery.stateful import Found
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


def test_a_kept_object_of_a_worker_that_is_replaced_between_two_steps_gets_its_state() -> None:
    with Simulation(1, ["driver", "b", "c"]) as sim, torch.random.fork_rng(devices=[]):

        def program() -> Any:
            serve(sim, "c")
            counts: dict[int, int] = {}
            with acting_as(sim["driver"]):
                training = recovery.Training(lambda: None, every=2)
                for step in training.steps(10):
                    if step == 5 and not training.recoveries:
                        sim.sleep(1.0)
                        sim.kill("c")
                        sim.sleep(3.0)
                        sim.restart("c")
                        serve(sim, "c")
                        sim.sleep(3.0)  # no call fails: the replacement is there before the next one
                    with training:
                        counts[step] = telegrad.rpc_sync("c", "@add")
            return counts, training.recoveries

        counts, recoveries = sim.run(program)
    assert counts == {step: step + 1 for step in range(10)}
    assert [(each.workers, each.step, each.resumed) for each in recoveries] == [(("c",), 5, 4)]


def test_a_replacement_takes_no_part_in_a_snapshot_of_the_one_before_it() -> None:
    with Simulation(1, ["driver", "b"]) as sim:

        def program() -> None:
            with (
                acting_as(sim["b"]),
                pytest.raises(RecoveryFailed, match="worker 'b' was replaced while the training took a snapshot"),
            ):
                shares.take(SnapshotId(Run("driver", 1, "aa"), 1), sim["b"].me.incarnation - 1, {}, 0)

        sim.run(program)


def test_an_object_that_is_kept_after_a_snapshot_goes_back_to_what_it_was() -> None:
    with Simulation(1, ["driver", "b"]) as sim, torch.random.fork_rng(devices=[]):

        def program() -> Any:
            counts: dict[int, int] = {}
            with acting_as(sim["driver"]):
                training = recovery.Training(lambda: None, every=4)
                for step in training.steps(6):
                    with training:
                        if step == 1 and not training.recoveries:
                            serve(sim, "driver")
                        if step == 3 and not training.recoveries:
                            sim.kill("b")
                            sim.restart("b")
                            telegrad.rpc_sync("b", "@missing")
                        if step >= 1:
                            counts[step] = telegrad.rpc_sync("driver", "@add")
                assert shares._vault().initial == {}, "it is part of a snapshot now"
            return counts, training.recoveries

        counts, recoveries = sim.run(program)
    assert counts == {step: step for step in range(1, 6)}
    assert [(each.step, each.resumed) for each in recoveries] == [(3, 0)]


def test_what_cannot_be_saved_is_refused_at_once() -> None:
    with Simulation(1, ["driver", "b"]) as sim:

        def program() -> None:
            with acting_as(sim["driver"]):
                with pytest.raises(TypeError, match="no snapshot can be taken of a int"):
                    recovery.keep("number", 5)
                module = telegrad.nn.RemoteModule("b", torch.nn.Linear, (1, 1))
                with pytest.raises(TypeError, match="keep the module itself, on worker 'b'"):
                    recovery.keep("module", module)

        sim.run(program)


def test_the_shares_of_a_driver_that_was_replaced_are_dropped() -> None:
    with Simulation(1, ["driver", "b"]) as sim:

        def program() -> None:
            with acting_as(sim["b"]):
                before, other = SnapshotId(Run("driver", 1, "aa"), 7), SnapshotId(Run("another", 1, "cc"), 1)
                now, me = SnapshotId(Run("driver", 2, "bb"), 1), sim["b"].me.incarnation
                for snapshot in (before, other):
                    shares.take(snapshot, me, {}, 0)
                    shares.hold(snapshot, "driver", ({}, {}, {}))
                shares.take(now, me, {}, 0)
                vault = shares._vault()
                assert set(vault.own) == {other, now}
                assert set(vault.held) == {(other, "driver")}

        sim.run(program)


def test_a_worker_that_joined_after_a_snapshot_has_nothing_to_load() -> None:
    with Simulation(1, ["driver", "b", "c"]) as sim, torch.random.fork_rng(devices=[]):

        def program() -> None:
            with acting_as(sim["driver"]):
                snapshots = Snapshots("driver", sim["driver"].me.incarnation, 2, None)
                everybody = {name: sim[name].me.incarnation for name in ("driver", "b", "c")}
                found = Found({"x": torch.zeros(1)}, {})
                snapshots.begin(found, {name: everybody[name] for name in ("driver", "b")}, 5)
                snapshots.finish()
                assert snapshots.load(found, everybody) == 5
                reference = telegrad.remote("c", torch.nn.Linear, (1, 1))
                with pytest.raises(RecoveryFailed, match="has built objects on worker 'c', of which there is no sna"):
                    snapshots.load(Found(found.local, {"c": {"y": reference}}), everybody)

        sim.run(program)


def test_the_number_of_a_snapshot_that_was_given_up_is_not_used_again(tmp_path: Path) -> None:
    with Simulation(1, ["driver", "b"]) as sim, torch.random.fork_rng(devices=[]):

        def program() -> None:
            with acting_as(sim["driver"]):
                snapshots = Snapshots("driver", sim["driver"].me.incarnation, 1, tmp_path)
                everybody = {name: sim[name].me.incarnation for name in ("driver", "b")}
                found = Found({"x": torch.zeros(1)}, {})
                snapshots.begin(found, everybody, 5)
                snapshots.finish()
                snapshots.begin(found, everybody, 6)
                snapshots.drop_all([])  # worker b may still write snapshot 2
                assert snapshots.load(found, everybody) == 5
                snapshots.begin(found, everybody, 5)
                snapshots.finish()
                latest = files.latest(tmp_path)
                assert latest is not None
                assert (latest.number, latest.step) == (3, 5)

        sim.run(program)
