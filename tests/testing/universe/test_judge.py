"""Which errors the faults explain."""

from __future__ import annotations

import pytest

from telegrad.errors import (
    BackwardError,
    CallCancelled,
    DeadlineExceeded,
    GroupsDiffer,
    NotInitialized,
    ReferenceGone,
    TelegradError,
    UnknownWorker,
    WorkerLost,
    WorkersFailed,
)
from telegrad.testing.universe.judge import objection
from telegrad.testing.universe.network import UniverseSimulation
from telegrad.testing.universe.plan import Fault, draw_plan
from telegrad.testing.universe.world import World


@pytest.fixture
def world() -> World:
    plan = draw_plan(1)
    return World(plan, UniverseSimulation(1, plan.workers))


@pytest.mark.parametrize(
    "error",
    [
        WorkerLost("lost", worker="w1"),
        DeadlineExceeded("late"),
        CallCancelled("cancelled"),
        ReferenceGone("gone"),
        NotInitialized("closed"),
        BackwardError("worker 'w1' failed"),
        WorkersFailed("two failed", errors={"w1": WorkerLost("lost", worker="w1")}),
        UnknownWorker("there is no worker named 'n0'"),
        GroupsDiffer("worker 'w0' has not heard of worker 'w1'"),
        TelegradError("a bug"),
        ValueError("not of telegrad"),
    ],
)
def test_nothing_explains_an_error_without_faults(world: World, error: Exception) -> None:
    assert objection(world, error, here="w0")


def test_a_killed_worker_explains_its_loss_and_no_other(world: World) -> None:
    world.suspect(Fault(0.0, "kill", ("w1",)))
    assert not objection(world, WorkerLost("lost", worker="w1"), here="w0")
    assert not objection(world, BackwardError("worker 'w1' is lost"), here="w0")
    assert not objection(world, ReferenceGone("gone"), here="w0", lineage={"w1"})
    assert objection(world, WorkerLost("lost", worker="w0"), here="w0")
    assert objection(world, WorkerLost("lost"), here="w0")
    assert objection(world, ReferenceGone("gone"), here="w0", lineage={"w0"})
    both = WorkersFailed("failed", errors={"w1": ReferenceGone("gone"), "w2": ReferenceGone("gone")})
    assert not objection(world, both, here="w0", lineage={"w1", "w2"})
    assert objection(world, both, here="w0", lineage={"w2"})


def test_a_deadline_or_a_cancellation_explains_its_error(world: World) -> None:
    assert not objection(world, DeadlineExceeded("late"), here="w0", may_be_late=True)
    assert not objection(world, CallCancelled("cancelled"), here="w0", may_be_cancelled=True)


def test_a_partition_explains_that_workers_know_different_groups(world: World) -> None:
    world.joined.add("n0")
    world.suspect(Fault(0.0, "kill", ("w1",)))
    assert objection(world, UnknownWorker("there is no worker named 'n0'"), here="w0")
    assert objection(world, GroupsDiffer("worker 'w0' has not heard of worker 'n0'"), here="w0")
    world.suspect(Fault(0.0, "partition", ("w0", "w1"), 80.0))
    assert not objection(world, UnknownWorker("there is no worker named 'n0'"), here="w0")
    assert not objection(world, GroupsDiffer("worker 'w0' has not heard of worker 'n0'"), here="w0")


def test_a_worker_that_left_explains_the_error_of_what_it_ran_for_another(world: World) -> None:
    world.suspect(Fault(0.0, "leave", ("w1",)))
    assert not objection(world, NotInitialized("worker 'w1' cannot call: it has been shut down"), here="w0")
    assert objection(world, NotInitialized("worker 'w0' cannot call: it has been shut down"), here="w0")
