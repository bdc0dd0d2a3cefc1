"""Collectives: every member contributes a value and gets those of all."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from telegrad import autograd, rpc
from telegrad.agent.agent import Agent
from telegrad.calls.collective_messages import Stage
from telegrad.calls.shutdown_rounds import _Round
from telegrad.errors import (
    CallCancelled,
    DeadlineExceeded,
    PayloadError,
    ResourceExhausted,
    TelegradError,
    UnknownWorker,
    WorkerLost,
)
from telegrad.protocol.limits import SessionSettings
from telegrad.protocol.shutdown_report import report_of, to_plain
from telegrad.settings import AgentSettings
from telegrad.testing.group import local_group
from telegrad.testing.scheduler import SimThread
from telegrad.testing.simulation import Simulation
from telegrad.waiting_report import WaitingReport


def test_a_worker_takes_part_only_in_collectives_of_which_it_is_a_member() -> None:
    with local_group(["a", "b", "c"]) as agents:
        with pytest.raises(ValueError, match="worker 'a' is not among"):
            agents["a"].gather(1, ["b", "c"])
        with pytest.raises(UnknownWorker, match="'d'"):
            agents["a"].gather(1, ["a", "d"])


MEMBERS = ("a", "b", "c", "d")


@pytest.mark.parametrize("answered", [(), ("b",), ("c",), ("d",), ("b", "c"), ("c", "d"), ("b", "d")])
@pytest.mark.parametrize("seed", range(5))
def test_a_shutdown_ends_if_its_root_leaves_after_answering_some_members(seed: int, answered: tuple[str, ...]) -> None:
    with Simulation(seed=seed, workers=MEMBERS) as sim:
        ended: list[str] = []

        def shut_down(name: str) -> None:
            sim[name].shutdown()
            ended.append(name)

        def program() -> None:
            rounds = sim["a"].collectives.shutdown_rounds
            answer = rounds._answer

            def answer_some(current: _Round, result: object, error: Exception | None) -> None:
                current.answers = [each for each in current.answers if each[0] in answered]
                answer(current, result, error)
                sim.spawn("a", sim["a"].close)

            rounds._answer = answer_some  # type: ignore[method-assign]  # the answers to the others get lost
            threads = [sim.spawn(name, partial(shut_down, name)) for name in MEMBERS[1:]]
            threads.append(sim.spawn("a", partial(take_part, sim["a"])))
            for thread in threads:
                assert thread.join(600.0), f"{thread.node} still waits"

        sim.run(program)
        assert sorted(ended) == ["b", "c", "d"]


def take_part(agent: Agent) -> None:
    """Take part in the first round of a shutdown, from which this worker will get no answer."""
    with contextlib.suppress(TelegradError):
        idle = report_of(agent.me.id, busy=False, calls=0, pending=False, sent={}, received={})
        agent.collectives.shutdown_round(to_plain(idle), None, WaitingReport(agent.runtime.now()))


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


def test_a_round_that_a_member_cannot_take_part_in_fails(monkeypatch: pytest.MonkeyPatch) -> None:
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
            assert errors.count("worker 'c' cannot take part in barrier(): no memory") == 2

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


# -- trees ------------------------------------------------------------------------------------------------------------

MANY = tuple(f"w{number}" for number in range(12))
TREE = AgentSettings(fan_out=2)
"""w0 has w1 and w2 below it, w1 has w3 and w4, and so on: w0 to w5 are not leaves."""


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("fan_out", [1, 2, 3])
def test_values_travel_along_a_tree(seed: int, fan_out: int) -> None:
    with Simulation(seed=seed, workers=MANY, settings=AgentSettings(fan_out=fan_out)) as sim:

        def take_part(name: str) -> None:
            rpc.barrier()
            for number in range(3):
                assert rpc.all_gather((name, number)) == {each: (each, number) for each in MANY}
            assert rpc.all_gather(None if name == "w5" else 1) == dict.fromkeys(MANY, 1) | {"w5": None}
            if name in MANY[3:]:
                assert rpc.all_gather(name, MANY[3:]) == {each: each for each in MANY[3:]}
            rpc.barrier()

        def program() -> None:
            threads = [late(sim, name, sim.random.random(), partial(take_part, name)) for name in MANY]
            for thread in threads:
                assert thread.join(60.0), f"{thread.node} still waits"

        sim.run(program)


def test_collectives_that_wait_hold_no_credits_that_others_need() -> None:
    """Each worker that collects values calls the one above it once when the first has come, and again at the end."""
    settings = AgentSettings(fan_out=1, session=SessionSettings(request_credits=2))
    names = ("a", "b", "c", "d")
    with Simulation(seed=1, workers=names, settings=settings) as sim:

        def program() -> None:
            waiting = sim.spawn("d", rpc.barrier)
            sim.sleep(1.0)
            few = [sim.spawn(name, partial(rpc.all_gather, name, names[:3])) for name in names[:3]]
            for thread in few:
                assert thread.join(30.0), f"{thread.node} still waits"
            for thread in [waiting, *(sim.spawn(name, rpc.barrier) for name in names[:3])]:
                assert thread.join(30.0), f"{thread.node} still waits"

        sim.run(program)


@pytest.mark.parametrize("victim", ["w0", "w1", "w4", "w5", "w11"])
@pytest.mark.parametrize("arrived", [False, True])
@pytest.mark.parametrize("absent", ["w2", "w3", "w10"])
def test_all_members_of_a_tree_hear_at_once_of_a_loss(victim: str, arrived: bool, absent: str) -> None:
    """Also those below a member, `absent`, that has not come itself."""
    with Simulation(seed=4, workers=MANY, settings=TREE) as sim:
        took: dict[str, float] = {}

        def take_part(name: str) -> None:
            with pytest.raises(WorkerLost) as caught:
                rpc.barrier()
            took[name] = sim.scheduler.now
            assert caught.value.worker == victim

        def program() -> None:
            names = [name for name in MANY if name != absent and (arrived or name != victim)]
            threads = {name: sim.spawn(name, partial(take_part, name)) for name in names}
            sim.sleep(10.0)
            sim.kill(victim)
            for name, thread in threads.items():
                assert name == victim or thread.join(60.0), f"{name} still waits"

        sim.run(program)
        assert all(10.0 <= when < 13.0 for when in took.values()), took
        assert set(took) == set(MANY) - {victim, absent}


def test_whoever_comes_late_to_a_round_that_failed_in_a_tree_gets_its_error() -> None:
    with Simulation(seed=1, workers=MANY, settings=TREE) as sim:
        after: list[dict[str, Any]] = []

        def take_part(name: str) -> None:
            with pytest.raises(DeadlineExceeded, match=r"workers? '(w10|w3)'.* did not join"):
                rpc.barrier(timeout=5.0)
            after.append(rpc.all_gather(name))

        def program() -> None:
            threads = [late(sim, name, 9.0 * (name in ("w3", "w10")), partial(take_part, name)) for name in MANY]
            for thread in threads:
                assert thread.join(60.0), f"{thread.node} still waits"

        sim.run(program)
        assert after == [{name: name for name in MANY}] * len(MANY)


def test_whoever_waits_in_a_tree_says_for_whom_wherever_that_is(caplog: pytest.LogCaptureFixture) -> None:
    with Simulation(seed=1, workers=MANY, settings=TREE) as sim:

        def program() -> None:
            threads = [late(sim, name, 5.0 * (name == "w10"), rpc.barrier) for name in MANY]
            for thread in threads:
                assert thread.join(60.0), f"{thread.node} still waits"

        sim.run(program)
    lines = sorted(record.getMessage() for record in caplog.records if "waited" in record.getMessage())
    assert lines == sorted(
        f"worker {name!r} has waited 3 s in barrier() for worker 'w10'" for name in MANY if name != "w10"
    )


def test_whoever_waits_in_a_tree_names_the_member_that_does_not_answer(caplog: pytest.LogCaptureFixture) -> None:
    """Not itself, and not the one between them."""
    with Simulation(seed=1, workers=MANY, settings=TREE) as sim:

        def program() -> None:
            threads = [late(sim, name, 12.0 * (name == "w0"), rpc.barrier) for name in MANY]
            sim.sleep(1.0)
            for name in MANY[1:]:
                sim.network.part("w0", name)
            sim.sleep(6.0)
            sim.network.heal()
            for thread in threads:
                assert thread.join(60.0), f"{thread.node} still waits"

        sim.run(program)
    lines = sorted(record.getMessage() for record in caplog.records if "waited 3 s" in record.getMessage())
    assert lines == sorted(
        f"worker {name!r} has waited 3 s in barrier() for worker 'w0', which collects the values and does not answer"
        for name in MANY[1:]
    )


def test_a_shutdown_that_has_lasted_too_long_raises_a_timeout_although_the_root_is_dead() -> None:
    with Simulation(seed=1, workers=MANY, settings=TREE) as sim:
        raised: dict[str, DeadlineExceeded] = {}

        def shut_down(name: str) -> None:
            with pytest.raises(DeadlineExceeded) as caught:
                sim[name].shutdown(timeout=5.0)
            raised[name] = caught.value

        def program() -> None:
            threads = [sim.spawn(name, partial(shut_down, name)) for name in MANY if name not in ("w0", "w2")]
            sim.sleep(4.9)
            sim.kill("w0")  # a worker below w1 asks w1, which asks w0
            for thread in threads:
                assert thread.join(60.0), f"{thread.node} still waits"

        sim.run(program)
        assert raised["w3"].worker == "w0"
        assert "worker 'w0' is lost" in str(raised["w3"])


@pytest.mark.parametrize("seed", range(12))
def test_a_member_that_is_ahead_of_the_others_fails_the_rounds_that_it_skipped(seed: int) -> None:
    with Simulation(seed=seed, workers=MANY[:7], settings=TREE) as sim:
        skips = MANY[sim.random.randrange(7)]

        def take_part(name: str) -> None:
            collectives = sim[name].collectives
            if name == skips:
                digest, known = collectives._views.current()
                collectives._numbers[digest] = 1, known  # its first call failed before it was sent
            else:
                with pytest.raises(CallCancelled, match=f"worker {skips!r} gave up"):
                    rpc.barrier()
            assert rpc.all_gather(name) == {each: each for each in MANY[:7]}

        def program() -> None:
            threads = [late(sim, name, sim.random.random(), partial(take_part, name)) for name in MANY[:7]]
            for thread in threads:
                assert thread.join(60.0), f"{thread.node} still waits"

        sim.run(program)


# -- values that do not arrive ----------------------------------------------------------------------------------------


class Unreadable:
    """Can be pickled but not unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _refuse, ()


def _refuse() -> None:
    raise LookupError("cannot be rebuilt")


class ReadableOnce:
    """Can be unpickled by the first who receives it, but not by the next."""

    def __init__(self, hops: int = 0) -> None:
        self.hops = hops

    def __reduce__(self) -> tuple[Any, ...]:
        return _refuse if self.hops else ReadableOnce, () if self.hops else (1,)


@pytest.mark.parametrize("make", [Unreadable, ReadableOnce, threading.Lock], ids=["unread", "once", "unsent"])
@pytest.mark.parametrize("source", ["w0", "w1", "w2", "w5", "w11"])
@pytest.mark.parametrize("first", [False, True])
def test_a_value_that_cannot_be_read_is_an_error_for_all(make: Callable[[], object], source: str, first: bool) -> None:
    with Simulation(seed=3, workers=MANY, settings=TREE) as sim:
        texts: dict[str, str] = {}

        def take_part(name: str) -> None:
            with pytest.raises(PayloadError) as caught:
                rpc.all_gather(make() if name == source else name)
            texts[name] = str(caught.value)
            assert rpc.all_gather(name) == {each: each for each in MANY}

        def program() -> None:
            threads = [
                late(sim, name, 1.0 if (name == source) != first else 0.0, partial(take_part, name)) for name in MANY
            ]
            for thread in threads:
                assert thread.join(60.0), f"{thread.node} still waits"

        sim.run(program)
        assert texts.keys() == set(MANY)
        assert all("pickle" in text for text in texts.values()), texts


@pytest.mark.parametrize("stage", [Stage.ENTER, Stage.SUBTREE])
@pytest.mark.parametrize("shutdown", [False, True])
def test_nobody_waits_for_ever_if_the_member_above_fails(
    monkeypatch: pytest.MonkeyPatch, stage: Stage, shutdown: bool
) -> None:
    with Simulation(seed=3, workers=MANY, settings=TREE) as sim:
        errors: dict[str, Exception | None] = {}

        def take_part(name: str) -> None:
            errors[name] = None
            try:
                sim[name].shutdown() if shutdown else rpc.barrier()
            except (PayloadError, MemoryError) as error:
                errors[name] = error

        def program() -> None:
            root = sim["w0"].collectives
            node: Any = root.shutdown_rounds if shutdown else root.node
            arrive = node.arrive

            def fail_once(*args: Any) -> None:
                if (args[4] if shutdown else args[1].stage) is stage:
                    monkeypatch.setattr(node, "arrive", arrive)
                    raise MemoryError
                arrive(*args)

            monkeypatch.setattr(node, "arrive", fail_once)
            for thread in [sim.spawn(name, partial(take_part, name)) for name in MANY]:
                assert thread.join(sim.scheduler.now + 60.0), f"{thread.node} still waits"

        sim.run(program)
        assert any(errors.values())
        assert shutdown or all("MemoryError" in str(error) for error in errors.values()), errors


def test_a_value_that_only_a_leaf_cannot_pass_ends_the_collective_of_a_star() -> None:
    with Simulation(seed=1, workers=MEMBERS) as sim:
        texts: dict[str, str] = {}

        def take_part(name: str) -> None:
            with pytest.raises(PayloadError) as caught:
                rpc.all_gather(Unreadable() if name == "c" else name)
            texts[name] = str(caught.value)

        def program() -> None:
            for thread in [sim.spawn(name, partial(take_part, name)) for name in MEMBERS]:
                assert thread.join(60.0), f"{thread.node} still waits"

        sim.run(program)
        assert all("worker 'c' cannot take part in all_gather(): " in texts[name] for name in "abd"), texts


def test_tensors_arrive_as_leaves_in_a_context_too() -> None:
    with Simulation(seed=1, workers=("a", "b")) as sim:

        def take_part(name: str) -> None:
            x = torch.ones(2, requires_grad=True)
            with autograd.context() as context_id:
                gathered = rpc.all_gather(2 * x)
                assert all(each.is_leaf and each.grad_fn is None for each in gathered.values())
                autograd.backward(context_id, [(3 * x).sum() + sum(each.sum() for each in gathered.values())])
                gradients = autograd.get_gradients(context_id)
                assert gradients[x].tolist() == [3.0, 3.0]

        def program() -> None:
            for thread in [sim.spawn(name, partial(take_part, name)) for name in "ab"]:
                assert thread.join(60.0), f"{thread.node} still waits"

        sim.run(program)
