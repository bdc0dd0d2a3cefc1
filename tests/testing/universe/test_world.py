"""What a world records, and what it reports as violated."""

from __future__ import annotations

import pytest

from telegrad.protocol.membership import Identity
from telegrad.testing.universe.network import UniverseSimulation
from telegrad.testing.universe.plan import draw_plan
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


def test_the_description_has_the_story_and_the_command_that_replays_it(world: World) -> None:
    world.story.add("w0", "begins %s", "call w1")
    world.violated("it broke\nwith details")
    text = describe(world)
    assert "begins call w1" in text
    assert "- it broke\nwith details" in text
    assert text.endswith("python -m telegrad.testing.simulate --seed 1")
