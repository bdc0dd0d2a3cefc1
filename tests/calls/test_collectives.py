"""Collectives: every member contributes a value and gets those of all."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from telegrad import rpc
from telegrad.agent.agent import Agent
from telegrad.agent.shutdown import RRefMessageCounts
from telegrad.calls.collective_root import Arrival, Round, View, _Collective
from telegrad.errors import (
    CallCancelled,
    DeadlineExceeded,
    ResourceExhausted,
    TelegradError,
    UnknownWorker,
    WorkerLost,
)
from telegrad.testing.group import local_group
from telegrad.testing.scheduler import SimThread
from telegrad.testing.simulation import Simulation
from telegrad.waiting_report import WaitingReport


def view_of(agent: Agent) -> View:
    return tuple((record.name, record.generation, record.incarnation) for record in agent.peers.records())


def test_the_root_gets_its_reply_last_because_it_may_leave_then() -> None:
    with local_group(["a", "b", "c"]) as agents:
        root, key = agents["a"].collectives.root, Round("user", 1, view_of(agents["a"]))
        replies: list[str] = []
        for name in ("a", "c", "b"):  # the root itself arrives first
            respond = partial(lambda name, values, error: replies.append(name), name)
            root.arrive(respond, Arrival(key, name, None, None, whole=True, oldest=1))
        assert replies == ["c", "b", "a"]


def test_a_worker_takes_part_only_in_collectives_of_which_it_is_a_member() -> None:
    with local_group(["a", "b", "c"]) as agents:
        with pytest.raises(ValueError, match="worker 'a' is not among"):
            agents["a"].gather(1, ["b", "c"])
        with pytest.raises(UnknownWorker, match="'d'"):
            agents["a"].gather(1, ["a", "d"])


MEMBERS = ("a", "b", "c", "d")


class Asked:
    """A member that asks a root for rounds of a shutdown, and keeps the answers."""

    def __init__(self, root: Agent) -> None:
        self.root = root
        self.answers: list[tuple[str, int, list[str]]] = []

    def ask(self, name: str, number: int) -> None:

        def respond(values: object, error: Exception | None) -> None:
            assert isinstance(values, dict)
            assert error is None
            self.answers.append((name, number, sorted(values)))

        key = Round("shutdown", number, ())
        self.root.collectives.root.arrive(respond, Arrival(key, name, None, None, whole=True, oldest=number))


def test_a_new_root_does_not_wait_for_a_round_that_some_members_have_completed() -> None:
    with local_group(MEMBERS) as agents:
        asked = Asked(agents["b"])
        asked.ask("b", 3)
        asked.ask("c", 3)
        assert asked.answers == [], "they wait for a and d"
        asked.ask("d", 4)
        assert sorted(asked.answers) == [("b", 3, []), ("c", 3, [])], "d has the result of round 3, so it is over"
        asked.answers.clear()
        asked.ask("a", 3)
        assert asked.answers == [("a", 3, [])]
        asked.answers.clear()
        for name in ("a", "b", "c"):
            asked.ask(name, 4)
        assert sorted(asked.answers) == [(name, 4, list(MEMBERS)) for name in MEMBERS]


def test_a_root_that_is_closing_answers_nobody() -> None:
    with local_group(MEMBERS) as agents:
        asked = Asked(agents["a"])
        for name in MEMBERS[1:]:
            asked.ask(name, 1)
        agents["a"].close()
        assert asked.answers == []


@pytest.mark.parametrize("answered", [(), ("b",), ("c",), ("d",), ("b", "c"), ("c", "d"), ("b", "d")])
@pytest.mark.parametrize("seed", range(5))
def test_a_shutdown_ends_if_its_root_leaves_after_answering_some_members(seed: int, answered: tuple[str, ...]) -> None:
    with Simulation(seed=seed, workers=MEMBERS) as sim:
        ended: list[str] = []

        def shut_down(name: str) -> None:
            sim[name].shutdown()
            ended.append(name)

        def program() -> None:
            root = sim["a"].collectives.root
            answer = root._answer

            def answer_some(collective: _Collective, values: Any, error: Exception | None) -> None:
                collective.answers = {name: collective.answers[name] for name in answered}
                answer(collective, values, error)
                sim.spawn("a", sim["a"].close)

            root._answer = answer_some  # type: ignore[method-assign]  # the answers to the others get lost
            threads = [sim.spawn(name, partial(shut_down, name)) for name in MEMBERS[1:]]
            threads.append(sim.spawn("a", partial(take_part, sim["a"])))
            for thread in threads:
                assert thread.join(600.0), f"{thread.node} still waits"

        sim.run(program)
        assert sorted(ended) == ["b", "c", "d"]


def take_part(agent: Agent) -> None:
    """Take part in the first round of a shutdown, from which this worker will get no answer."""
    with contextlib.suppress(TelegradError):
        value = (0, False, 0, RRefMessageCounts(False, {}, {}))
        agent.collectives.shutdown_round(value, None, WaitingReport(agent.runtime.now()))


# -- waiting says for whom --------------------------------------------------------------------------------------------


def late(sim: Simulation, name: str, seconds: float, function: Callable[[], object]) -> SimThread:
    """Have a worker call a function after some seconds."""

    def program() -> None:
        sim.sleep(seconds)
        function()

    return sim.spawn(name, program)


def test_everybody_who_waits_in_a_barrier_says_for_whom_ever_more_rarely(caplog: pytest.LogCaptureFixture) -> None:
    with Simulation(seed=1, workers=["a", "b", "c", "d"]) as sim:

        def program() -> float:
            delays = {"a": 0.0, "c": 0.0, "b": 7.0, "d": 64.0}
            threads = [late(sim, name, delay, rpc.barrier) for name, delay in delays.items()]
            for thread in threads:
                assert thread.join(70.0)
            return sim.scheduler.now

        assert 64 <= sim.run(program) < 65, "there is no limit, and it ends when the last one has come"
    lines = [record.getMessage() for record in caplog.records if "waited" in record.getMessage()]
    assert {record.levelname for record in caplog.records if "waited" in record.getMessage()} == {"WARNING"}
    for name in ("a", "c"):
        assert [line for line in lines if line.startswith(f"worker {name!r}")] == [
            f"worker {name!r} has waited 3 s in barrier() for workers 'b' and 'd'",
            f"worker {name!r} has waited 6 s in barrier() for workers 'b' and 'd'",
            f"worker {name!r} has waited 12 s in barrier() for worker 'd'",
            f"worker {name!r} has waited 24 s in barrier() for worker 'd'",
            f"worker {name!r} has waited 48 s in barrier() for worker 'd'",
        ]
    assert "worker 'b' has waited 3 s in barrier() for worker 'd'" in lines


def test_a_worker_whose_root_does_not_answer_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with Simulation(seed=1, workers=["a", "b"]) as sim:

        def program() -> None:
            threads = [sim.spawn("b", partial(rpc.all_gather, 1)), late(sim, "a", 20.0, partial(rpc.all_gather, 2))]
            sim.sleep(2.0)
            sim.network.part("a", "b")
            sim.sleep(6.0)
            sim.network.heal()
            for thread in threads:
                assert thread.join(60.0)

        sim.run(program)
    lines = [record.getMessage() for record in caplog.records if "all_gather" in record.getMessage()]
    assert lines == [
        "worker 'b' has waited 3 s in all_gather() for worker 'a', which collects the values and does not answer",
        "worker 'b' has waited 6 s in all_gather() for worker 'a', which collects the values and does not answer",
        "worker 'b' has waited 12 s in all_gather() for worker 'a'",
    ]


def test_a_short_wait_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    with Simulation(seed=1, workers=["a", "b"]) as sim:

        def program() -> None:
            threads = [sim.spawn("a", rpc.barrier), late(sim, "b", 2.9, rpc.barrier)]
            for thread in threads:
                assert thread.join(10.0)
            sim.sleep(20.0)

        sim.run(program)
    assert "waited" not in caplog.text


# -- rounds that fail -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(10))
def test_a_member_that_comes_too_late_learns_that_the_others_gave_up(seed: int) -> None:
    with Simulation(seed=seed, workers=["a", "b", "c"]) as sim:
        after: dict[str, dict[str, Any]] = {}

        def take_part(name: str) -> None:
            with pytest.raises(DeadlineExceeded, match="after 5 s worker 'c' did not join"):
                rpc.barrier(timeout=5.0)
            after[name] = rpc.all_gather(name)

        def program() -> None:
            threads = [sim.spawn(name, partial(take_part, name)) for name in ("a", "b")]
            threads.append(late(sim, "c", 9.0, partial(take_part, "c")))
            for thread in threads:
                assert thread.join(30.0), f"{thread.node} still waits"

        sim.run(program)
        assert after == {name: {"a": "a", "b": "b", "c": "c"} for name in "abc"}


def test_a_round_that_a_member_skipped_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    with Simulation(seed=3, workers=["a", "b", "c"]) as sim:

        def program() -> None:
            c = sim["c"]
            call, errors = c.collectives._call, []

            def refuse(*args: Any, **kwargs: Any) -> Any:
                c.collectives._call = call
                raise ResourceExhausted("no memory")

            def take_part(name: str) -> None:
                with pytest.raises(ResourceExhausted if name == "c" else CallCancelled) as caught:
                    rpc.barrier()
                errors.append(str(caught.value))
                assert rpc.all_gather(name) == {"a": "a", "b": "b", "c": "c"}

            c.collectives._call = refuse
            threads = [sim.spawn(name, partial(take_part, name)) for name in ("a", "b", "c")]
            for thread in threads:
                assert thread.join(30.0), f"{thread.node} still waits"
            assert errors.count("worker 'c' gave up this collective, so not all workers can take part") == 2

        sim.run(program)


@pytest.mark.parametrize("seed", range(10))
def test_several_threads_of_each_worker_may_be_in_collectives_of_the_same_workers(seed: int) -> None:
    with Simulation(seed=seed, workers=["a", "b", "c"]) as sim:

        def program() -> None:
            threads = [
                late(sim, name, sim.random.random(), partial(rpc.all_gather, "x" * size))
                for name in ("a", "b", "c")
                for size in (0, 100_000, 1, 200_000)
            ]
            for thread in threads:
                assert thread.join(30.0), f"{thread.node} still waits"

        sim.run(program)


@pytest.mark.parametrize("victim", ["a", "b", "c"])
@pytest.mark.parametrize("arrived", [False, True])
def test_a_collective_ends_at_once_when_a_member_is_lost(victim: str, arrived: bool) -> None:
    with Simulation(seed=4, workers=["a", "b", "c", "d"]) as sim:
        took: dict[str, float] = {}

        def take_part(name: str) -> None:
            with pytest.raises(WorkerLost) as caught:
                rpc.barrier()
            took[name] = sim.scheduler.now
            assert caught.value.worker == victim

        def program() -> None:
            names = [name for name in ("a", "b", "c") if arrived or name != victim]
            threads = {name: sim.spawn(name, partial(take_part, name)) for name in names}
            sim.sleep(10.0)
            sim.kill(victim)
            for name, thread in threads.items():
                assert name == victim or thread.join(60.0), f"{name} still waits"

        sim.run(program)
        assert all(10.0 <= when < 13.0 for when in took.values()), took
        assert set(took) == {"a", "b", "c"} - {victim}
