"""Those who want to know of losses hear of them once, and those who wait for a worker are woken when it is there."""

from __future__ import annotations

import logging
import operator

import pytest

from telegrad.protocol.membership import Member, State
from telegrad.testing.simulation import Simulation


def test_a_callback_hears_of_each_loss_until_it_is_removed() -> None:
    heard: list[tuple[str, str]] = []

    def lost(member: Member, reason: str) -> None:
        assert member.state is State.LOST
        heard.append((member.identity.name, reason))

    with Simulation(1, ["a", "b", "c"]) as sim:

        def program() -> None:
            remove = sim["a"].peers.members.on_lost(lost)
            for name in "bc":
                sim["a"].call(name, operator.add, (1, 2))
            sim.kill("b")
            sim.sleep(40)
            remove()
            remove()
            sim.kill("c")
            sim.sleep(40)

        sim.run(program)
    assert [name for name, _ in heard] == ["b"]
    assert "memory://b refuses connections" in heard[0][1]


@pytest.mark.parametrize("error", [ZeroDivisionError, SystemExit, KeyboardInterrupt])
def test_a_callback_that_fails_is_logged(error: type[BaseException], caplog: pytest.LogCaptureFixture) -> None:
    def fail(member: Member, reason: str) -> None:
        raise error

    with Simulation(1, ["a", "b"]) as sim:

        def program() -> None:
            sim["a"].peers.members.on_lost(fail)
            sim["a"].call("b", operator.add, (1, 2))
            sim.kill("b")
            sim.sleep(40)
            assert sim["a"].call("a", operator.add, (1, 2)) == 3

        with caplog.at_level(logging.ERROR, "telegrad"):
            sim.run(program)
    assert "a callback for lost workers failed for worker 'b'" in caplog.text


def test_a_worker_that_leaves_in_order_is_no_loss() -> None:
    heard: list[str] = []
    with Simulation(1, ["a", "b"]) as sim:

        def program() -> None:
            sim["a"].peers.members.on_lost(lambda member, reason: heard.append(reason))
            sim["a"].call("b", operator.add, (1, 2))
            sim.agents.pop("b").close()
            sim.sleep(5)
            member = sim["a"].peers.members.find("b")
            assert member is not None
            assert member.state is State.LEFT

        sim.run(program)
    assert heard == []


def test_a_worker_that_is_replaced_before_anybody_noticed_its_loss_is_a_loss() -> None:
    heard: list[tuple[int, State, str]] = []
    with Simulation(1, ["a", "b"]) as sim:

        def program() -> None:
            sim["a"].peers.members.on_lost(
                lambda member, reason: heard.append((member.identity.incarnation, member.state, reason))
            )
            before = sim["b"].me.incarnation
            sim.kill("b")
            sim.restart("b")
            sim.sleep(1)
            assert heard == [(before, State.LOST, "it was restarted")]

        sim.run(program)


def test_a_thread_waits_for_a_worker_until_it_is_there_again() -> None:
    with Simulation(1, ["a", "b"]) as sim:

        def program() -> None:
            members = sim["a"].peers.members
            assert members.wait_for("b", None)
            sim["a"].call("b", operator.add, (1, 2))
            sim.kill("b")
            sim.sleep(40)
            assert not members.wait_for("b", sim.scheduler.now + 3)
            waited: list[bool] = []
            sim.spawn("a", lambda: waited.append(members.wait_for("b", None)))
            sim.sleep(1)
            assert waited == []
            sim.restart("b")
            sim.sleep(1)
            assert waited == [True]

        sim.run(program)


def test_a_wait_for_a_worker_ends_when_this_one_is_closed() -> None:
    with Simulation(1, ["a", "b"]) as sim:

        def program() -> None:
            members = sim["a"].peers.members
            sim["a"].call("b", operator.add, (1, 2))
            sim.kill("b")
            sim.sleep(40)
            waited: list[bool] = []
            sim.spawn("a", lambda: waited.append(members.wait_for("b", None)))
            sim.sleep(1)
            sim.agents.pop("a").close()
            assert waited == [False]

        sim.run(program)
