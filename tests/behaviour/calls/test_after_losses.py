"""What must not be lost or kept after calls are given up, and after workers are lost or replaced."""

from __future__ import annotations

import gc

import pytest

from telegrad import rpc
from telegrad.agent.agent import Agent
from telegrad.errors import DeadlineExceeded, WorkerLost
from telegrad.protocol.limits import SessionSettings
from telegrad.rref.handle import RRef
from telegrad.settings import AgentSettings
from telegrad.testing.simulation import Simulation
from telegrad.testing.universe.network import UniverseSimulation
from telegrad.wire.messages import CleanupAutogradContextReq

NOTICE = CleanupAutogradContextReq(1, 2)


@pytest.mark.parametrize("resumable", [False, True], ids=["unix", "tcp"])
def test_a_call_that_was_given_up_returns_its_credits(resumable: bool) -> None:
    settings = AgentSettings(session=SessionSettings(request_credits=1))
    with Simulation(1, ["a", "b"], resumable=resumable, settings=settings) as sim:

        def program() -> int:
            sim["b"].register("slow", lambda: sim.sleep(0.1))
            sim["b"].register("quick", lambda: 1)
            with pytest.raises(DeadlineExceeded):
                sim["a"].call("b", "@slow", timeout=0.05)
            return int(sim["a"].call("b", "@quick", timeout=5.0))

        assert sim.run(program) == 1


def test_a_message_to_a_replacement_does_not_wait_for_a_connection_to_its_predecessor() -> None:
    with UniverseSimulation(3, ["a", "b"]) as sim:
        told: list[object] = []

        def listen(agent: Agent) -> None:
            agent.handle(CleanupAutogradContextReq, lambda *args: told.append(args))

        def program() -> None:
            sim.kill("b")
            sim["a"].tell(1, NOTICE)  # connects to the old incarnation, which takes a second to fail
            sim.sleep(0.1)
            sim.restart(
                "b", prepare=lambda agent: agent.handle(CleanupAutogradContextReq, lambda *args: told.append(args))
            )
            sim["a"].tell(1, NOTICE)
            sim.sleep(3.0)

        sim.run(program)
        assert len(told) == 1


def test_a_reference_in_a_reply_to_a_replaced_worker_is_released() -> None:
    with Simulation(4, ["a", "b"]) as sim:

        def make() -> RRef[str]:
            rref = RRef("a value")
            sim.sleep(2.0)
            return rref

        def call() -> None:
            with pytest.raises(WorkerLost):
                rpc.rpc_sync("b", "@make")

        def program() -> None:
            sim["b"].register("make", make)
            sim.spawn("a", call)
            sim.sleep(1.0)
            sim.kill("a")
            sim.restart("a")
            sim.sleep(3.0)
            gc.collect()
            sim.sleep(1.0)
            assert sim["b"].references.counts()["owned"] == 0

        sim.run(program)


@pytest.mark.parametrize("resumable", [False, True], ids=["unix", "tcp"])
def test_a_worker_that_slept_while_it_connected_to_itself_is_not_lost_to_itself(resumable: bool) -> None:
    with Simulation(5, ["a", "b"], resumable=resumable) as sim:

        def program() -> None:
            thread = sim.spawn("a", lambda: rpc.rpc_sync("a", abs, (-1,), timeout=0))
            sim.scheduler.jump("a", 75.0)
            assert thread.join(sim.scheduler.now + 60.0)
            assert not sim["a"].peers.find("a").gone

        sim.run(program)
