"""What the checker finds when the programs of a universe have ended."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from telegrad.protocol.membership import State
from telegrad.testing.universe.checker import check_membership, check_memory, left_behind
from telegrad.testing.universe.network import UniverseSimulation
from telegrad.testing.universe.plan import draw_plan
from telegrad.testing.universe.services import Services
from telegrad.testing.universe.world import World


@pytest.fixture
def frozen() -> Iterator[None]:
    """Freeze what is there, as a universe does."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def check(program: Callable[[World], None]) -> list[str]:
    """Run a program on two workers, and return what it violates."""
    plan = replace(draw_plan(1), workers=("w0", "w1"), autograd_program=None)
    with UniverseSimulation(1, plan.workers) as sim:
        world = World(plan, sim)

        def run() -> None:
            for agent in sim.agents.values():
                Services(world, agent)
            program(world)

        sim.run(run)
    return world.violations


def call(world: World) -> None:
    """Make a call that returns."""
    assert world.sim["w0"].call("w1", "@hop", (world.new_key("call", "w0"), [], b"")) == ["w1"]


@pytest.mark.usefixtures("frozen")
def test_a_call_leaves_nothing_and_a_kept_future_is_found() -> None:
    kept: list[object] = []

    def program(world: World) -> None:
        call(world)
        check_memory(world)
        assert not world.violations
        world.sim.spawn("w0", lambda: kept.append(_future())).join(None)
        check_memory(world)

    assert check(program) == ["objects are kept although nothing runs: {'Future': 1}"]


def _future() -> object:
    from telegrad import rpc

    future = rpc.rpc_async("w1", "@hop", ("call of w0", [], b""))
    assert future.wait() == ["w1"]
    return future


def test_a_credit_that_is_never_returned_is_found() -> None:
    def program(world: World) -> None:
        call(world)
        agent = world.sim["w0"]
        world.sim.sleep(1.0)
        assert not left_behind(agent)
        channel = agent.peers.find("w1").outgoing
        assert channel is not None
        assert channel.credits.acquire(1)
        assert left_behind(agent) == {"channel to w1: credits": (1, 0)}

    assert not check(program)


def test_a_member_that_holds_another_for_lost_without_a_cause_is_found() -> None:
    def program(world: World) -> None:
        check_membership(world)
        assert not world.violations
        agent = world.sim["w0"]
        agent.peers.members.gone(world.sim["w1"].me, "no reason", left=False)
        member = agent.peers.members.find("w1")
        assert member is not None
        assert member.state is State.LOST
        check_membership(world)

    (violation,) = [each for each in check(program) if "does not know" in each]
    assert violation.startswith("w0 does not know that w1 is there")
