"""What a world records, and what it reports as violated."""

from __future__ import annotations

import pytest

from telegrad.protocol.membership import Identity, Member, State
from telegrad.testing.universe.network import UniverseSimulation
from telegrad.testing.universe.plan import Fault, draw_plan
from telegrad.testing.universe.run import describe
from telegrad.testing.universe.world import World


@pytest.fixture
def world() -> World:
    plan = draw_plan(1)
    return World(plan, UniverseSimulation(1, plan.workers))


def test_a_function_that_runs_twice_is_a_violation(world: World) -> None:
    world.serves("call 1", "w0")
    assert not world.violations
    world.serves("call 1", "w0")
    assert world.violations == ["call 1 ran 2 times"]


def test_a_result_of_a_function_that_did_not_run_is_a_violation(world: World) -> None:
    world.has_returned("call 1")
    assert world.violations == ["call 1 returned, but ran 0 times"]


def test_two_incarnations_in_one_generation_are_a_violation(world: World) -> None:
    world.admitted(Identity("w0", 0, 11, 1))
    world.admitted(Identity("w0", 0, 11, 1))
    world.admitted(Identity("w0", 0, 12, 2))
    assert not world.violations
    world.admitted(Identity("w0", 0, 13, 2))
    assert "generation 2" in world.violations[0]


def test_a_loss_that_nothing_explains_or_that_is_told_twice_is_a_violation() -> None:
    plan = draw_plan(1)
    with UniverseSimulation(1, plan.workers) as sim:
        world = World(plan, sim)

        def program() -> None:
            w0, w1 = sim["w0"], Member(Identity("w1", 1, 11, 0), State.LOST, 0.0)
            world.lost(w0, w1, "no frame")
            assert "nothing had happened" in world.violations.pop()
            world.suspect(Fault(0.0, "kill", ("w1",)))
            world.lost(w0, Member(Identity("w1", 1, 12, 1), State.LOST, 0.0), "it was killed")
            assert not world.violations
            world.lost(w0, w1, "no frame")
            assert world.violations == ["w0 was told twice that it had lost w1"]

        sim.run(program)


def test_the_description_has_the_story_and_the_command_that_replays_it(world: World) -> None:
    world.story.add("w0", "begins %s", "call w1")
    world.violated("it broke\nwith details")
    text = describe(world)
    assert "begins call w1" in text
    assert "- it broke\nwith details" in text
    assert text.endswith("python -m telegrad.testing.simulate --seed 1")
