"""Programs see who is in the group, wait for workers that return, and hear of losses."""

from __future__ import annotations

import operator
from typing import Any

import pytest

import telegrad
from telegrad import rpc
from telegrad.default_agent import acting_as
from telegrad.errors import DeadlineExceeded, NotInitialized, UnknownWorker
from telegrad.testing.simulation import Simulation


def run(program: Any, names: str = "abc") -> None:
    with Simulation(1, list(names)) as sim:

        def main() -> None:
            with acting_as(sim["a"]):
                for name in names:
                    telegrad.rpc_sync(name, operator.add, (1, 2))
                program(sim)

        sim.run(main)


def test_workers_are_listed_with_state_generation_and_age() -> None:
    def program(sim: Simulation) -> None:
        sim.sleep(10)
        sim.kill("b")
        sim.sleep(20)
        sim.agents.pop("c").close()
        sim.sleep(5)
        a, b, c = rpc.workers()
        assert [(each.name, each.id, each.state, each.generation) for each in (a, b, c)] == [
            ("a", 0, "alive", 0),
            ("b", 1, "lost", 0),
            ("c", 2, "left", 0),
        ]
        assert a.age == pytest.approx(35, abs=1)
        assert 20 < b.age < 25
        assert c.age == pytest.approx(5, abs=1)
        sim.restart("b")
        b = rpc.workers()[1]
        assert (b.state, b.generation) == ("alive", 1)
        assert b.age < 1

    run(program)


def test_waiting_for_a_worker_ends_when_it_was_replaced() -> None:
    def program(sim: Simulation) -> None:
        assert rpc.wait_for_worker("b").generation == 0
        sim.kill("b")
        sim.sleep(5)
        with pytest.raises(DeadlineExceeded, match="worker 'b' was not there after 3 s: start it again") as caught:
            rpc.wait_for_worker("b", 3)
        assert caught.value.worker == "b"

        def restart() -> None:
            sim.sleep(7)
            sim.restart("b")

        sim.scheduler.start("launcher", "restart", restart)
        assert rpc.wait_for_worker("b", 20).generation == 1
        assert telegrad.rpc_sync("b", operator.add, (1, 2)) == 3

    run(program)


def test_waiting_for_a_worker_says_for_whom(caplog: pytest.LogCaptureFixture) -> None:
    def program(sim: Simulation) -> None:
        b = rpc.get_worker_info("b")
        assert rpc.wait_for_worker(b).name == "b"
        sim.kill("b")
        sim.sleep(5)
        with pytest.raises(DeadlineExceeded):
            rpc.wait_for_worker(b, 4)
        assert "worker 'a' has waited 3 s in wait_for_worker() for worker 'b'" in caplog.messages

    run(program)


def test_a_coroutine_function_is_no_callback() -> None:
    async def callback(status: object, reason: str) -> None: ...

    def program(sim: Simulation) -> None:
        with pytest.raises(TypeError, match=r"must be a plain function, not the coroutine function .*callback"):
            rpc.on_worker_lost(callback)  # type: ignore[arg-type] # the mistake

    run(program)


def test_waiting_for_a_worker_that_cannot_come_is_an_error() -> None:
    def program(sim: Simulation) -> None:
        with pytest.raises(UnknownWorker, match="there is no worker named 'x'"):
            rpc.wait_for_worker("x")
        sim.kill("b")
        sim.sleep(5)
        errors = []

        def wait() -> None:
            try:
                rpc.wait_for_worker("b")
            except NotInitialized as error:
                errors.append(str(error))

        sim.spawn("a", wait)
        sim.sleep(1)
        sim.agents.pop("a").close()
        assert errors == ["worker 'a' waited for worker 'b', but it has been shut down"]

    run(program)


@pytest.mark.parametrize(
    ("name", "timeout", "error", "message"),
    [
        (None, 1.0, ValueError, "invalid worker name None"),
        (1, 1.0, ValueError, "invalid worker name 1"),
        ("b", "5", TypeError, "timeout must be a number of seconds, or None for no limit, not '5'"),
        ("b", -1, ValueError, "timeout must be at least 0 seconds, or None for no limit, not -1"),
        ("b", float("nan"), ValueError, "timeout must be at least 0 seconds, or None for no limit, not nan"),
    ],
)
def test_waiting_for_a_worker_checks_its_arguments(name: Any, timeout: Any, error: type, message: str) -> None:
    def program(sim: Simulation) -> None:
        with pytest.raises(error, match=message):
            rpc.wait_for_worker(name, timeout)
        with pytest.raises(TypeError, match="must be a function of status and reason, not None"):
            rpc.on_worker_lost(None)  # type: ignore[arg-type] # the mistake

    run(program)


def test_a_callback_hears_of_losses() -> None:
    def program(sim: Simulation) -> None:
        heard: list[tuple[str, str, str]] = []
        remove = rpc.on_worker_lost(lambda status, reason: heard.append((status.name, status.state, reason)))
        sim.kill("b")
        sim.sleep(5)
        assert [(name, state) for name, state, _ in heard] == [("b", "lost")]
        assert "refuses connections" in heard[0][2]
        remove()
        sim.kill("c")
        sim.sleep(5)
        assert len(heard) == 1

    run(program)
