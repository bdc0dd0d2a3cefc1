"""Calls of idempotent functions, whose worker is killed and replaced while they run."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy
import pytest
import torch

import telegrad
from telegrad import autograd, rpc
from telegrad.errors import CallCancelled, DeadlineExceeded, PayloadError, RemoteError, WorkerLost
from telegrad.settings import AgentSettings
from telegrad.testing.simulation import Simulation

SEEDS = range(5)
runs: list[str] = []


@pytest.fixture(autouse=True)
def no_runs() -> Iterator[None]:
    runs.clear()
    yield
    runs.clear()


def pause(seconds: float) -> None:
    """Let virtual time pass in a function that is called."""
    served = rpc.current_call()
    assert served is not None
    served.agent.executor.wait(served.agent.runtime.event(), served.agent.runtime.now() + seconds)


def run_slowly(value: Any) -> Any:
    runs.append(rpc.get_worker_info().name)
    pause(2.0)
    return value


@telegrad.idempotent(retries=3, backoff=0.5)
def slow(value: Any) -> Any:
    return run_slowly(value)


@telegrad.idempotent
def triple(x: torch.Tensor) -> torch.Tensor:
    return run_slowly(3 * x)


@telegrad.idempotent
def fetch(reference: telegrad.RRef[Any]) -> Any:
    return run_slowly(reference.to_here())


@telegrad.idempotent
def call_next(value: Any) -> Any:
    runs.append(rpc.get_worker_info().name)
    return rpc.rpc_sync("c", run_slowly, (value,))


@telegrad.idempotent
def call_next_idempotent(value: Any) -> Any:
    runs.append(rpc.get_worker_info().name)
    return rpc.rpc_sync("c", slow, (value,))


def story(
    seed: int,
    program: Callable[[Simulation], Any],
    *,
    kills: int = 1,
    victim: str = "b",
    back_after: float = 1.0,
    settings: AgentSettings | None = None,
) -> Any:
    """Run a program on worker a, while another worker is killed and replaced."""
    with Simulation(seed=seed, workers=["a", "b", "c"], settings=settings) as sim:
        outcome: list[Any] = []

        def main() -> Any:
            thread = sim.spawn("a", lambda: outcome.append(program(sim)))
            for _ in range(kills):
                sim.sleep(1.0)
                sim.kill(victim)
                if back_after >= 0:
                    sim.sleep(back_after)
                    sim.restart(victim)
            assert thread.join(200.0), "it still waits"
            return outcome[0]

        return sim.run(main)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("call", [rpc.rpc_sync, lambda *args: rpc.rpc_async(*args).wait()], ids=["sync", "async"])
def test_an_idempotent_function_is_called_again_on_the_replacement(
    seed: int, call: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    assert story(seed, lambda sim: call("b", slow, ({"x": [1, 2]},))) == {"x": [1, 2]}
    assert runs == ["b", "b"]
    assert "worker 'a' calls test_retries:slow on worker 'b' again (attempt 2 of 4): worker 'b' is lost" in (
        caplog.text.replace("tests.behaviour.membership.", "")
    )


@pytest.mark.parametrize("call", [rpc.rpc_sync, lambda *args: rpc.rpc_async(*args).wait()], ids=["sync", "async"])
def test_other_functions_are_never_called_again(call: Callable[..., Any]) -> None:
    def program(sim: Simulation) -> None:
        with pytest.raises(WorkerLost, match="may or may not have run"):
            call("b", run_slowly, (1,))
        sim.sleep(10.0)

    story(1, program)
    assert runs == ["b"]


def test_retries_of_other_functions_are_refused() -> None:
    def program(sim: Simulation) -> None:
        for call in (rpc.rpc_sync, rpc.rpc_async):
            with pytest.raises(ValueError, match=r"calls of run_slowly cannot be made again.* might run twice"):
                call("b", run_slowly, (1,), retries=2)
            with pytest.raises(ValueError, match=r"calls of 'abs' cannot be made again.* a name does not say"):
                call("b", "abs", (1,), retries=2)
            for wrong in (-1, 1.5, True):
                with pytest.raises(ValueError, match="retries must be an integer, at least 0"):
                    call("b", slow, (1,), retries=wrong)  # type: ignore[arg-type]  # that is the test
        with pytest.raises(ValueError, match="catch WorkerLost"):
            rpc.remote("b", slow, (1,), retries=1)
        assert rpc.rpc_sync("c", abs, (-1,), retries=0) == 1

    story(1, program)


def test_the_call_may_say_how_often() -> None:
    def program(sim: Simulation) -> None:
        with pytest.raises(WorkerLost, match=r"may or may not have run$"):
            rpc.rpc_sync("b", slow, (1,), retries=0)
        sim.sleep(10.0)

    story(1, program)
    assert runs == ["b"]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("call", [rpc.rpc_sync, lambda *args, **k: rpc.rpc_async(*args, **k).wait()])
def test_the_last_error_says_how_often_it_was_called(seed: int, call: Callable[..., Any]) -> None:
    def program(sim: Simulation) -> None:
        with pytest.raises(WorkerLost, match=r"\. \S+:slow was called in 3 attempts$") as caught:
            call("b", slow, (1,), retries=2, timeout=0)
        assert isinstance(caught.value.__cause__, WorkerLost)
        assert caught.value.worker == "b"

    story(seed, program, kills=8, back_after=2.5)
    assert runs == ["b", "b", "b"]


@pytest.mark.parametrize("call", [rpc.rpc_sync, lambda *args, **k: rpc.rpc_async(*args, **k).wait()])
def test_the_deadline_bounds_the_wait_for_a_replacement(
    call: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    def program(sim: Simulation) -> None:
        began = sim.scheduler.now
        with pytest.raises(DeadlineExceeded, match=r"'b' is lost, and was not replaced before .* after 1 attempt;"):
            call("b", slow, (1,), timeout=20)
        assert 20.0 <= sim.scheduler.now - began < 20.1
        with pytest.raises(DeadlineExceeded, match=r"deadline of the call of \S+:slow, after 1 attempt;") as caught:
            call("b", slow, (1,), timeout=1)  # known to be lost, so no attempt is sent
        assert caught.value.function == f"{__name__}:slow"

    story(1, program, back_after=-1)
    assert "worker 'a' has waited 3 s for a replacement of worker 'b', to call " in caplog.text


def test_a_worker_that_left_in_order_is_not_waited_for() -> None:
    with Simulation(seed=1, workers=["a", "b"]) as sim:

        def program() -> None:
            assert sim["a"].call("b", abs, (-1,)) == 1
            sim["b"].close()
            sim.sleep(1.0)
            began = sim.scheduler.now

            def call() -> None:
                with pytest.raises(WorkerLost, match=r"it has shut down\. \S+:slow was called in 1 attempt$"):
                    rpc.rpc_sync("b", slow, (1,))

            assert sim.spawn("a", call).join(20.0)
            assert sim.scheduler.now - began < 1.0

        sim.run(program)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_worker_that_ended_with_an_error_is_waited_for(seed: int) -> None:
    """As a launcher does, which starts it again."""
    with Simulation(seed=seed, workers=["a", "b", "c"]) as sim:

        def program() -> None:
            results: list[Any] = []
            thread = sim.spawn("a", lambda: results.append(rpc.rpc_sync("b", slow, (1,))))
            sim.sleep(1.0)
            sim["b"].shutdown_protocol.note_cause(ValueError("no such file"))
            sim.agents.pop("b").close()
            sim.sleep(1.0)
            sim.restart("b")
            assert thread.join(20.0)
            assert results == [1]

        sim.run(program)
    assert runs == ["b", "b"]


def test_a_call_that_is_cancelled_is_not_made_again() -> None:
    def program(sim: Simulation) -> None:
        future = rpc.rpc_async("b", slow, (1,))
        sim.sleep(3.0)  # it waits for the replacement
        assert not future.done()
        assert future.cancel()
        with pytest.raises(CallCancelled, match="after 1 attempt, while it waited for the replacement"):
            future.wait()
        assert not future.cancel()
        sim.sleep(20.0)

    story(1, program, back_after=4.0)
    assert runs == ["b"]


def test_a_shutdown_waits_for_a_call_that_waits_for_a_replacement() -> None:
    def program(sim: Simulation) -> Any:
        future = rpc.rpc_async("b", slow, (1,))
        sim.sleep(2.5)
        assert sim["a"].activity() == ["a call on worker 'b', which is lost, waits for its replacement"]

        def leave_when_replaced() -> None:
            rpc.wait_for_worker("b")
            assert sim.spawn("b", partial(leave, sim, "b")).join(30.0)

        others = [sim.spawn("c", partial(leave, sim, "c")), sim.spawn("a", leave_when_replaced)]
        sim["a"].shutdown()
        for thread in others:
            assert thread.join(30.0)
        return future.wait()

    assert story(1, program, back_after=2.0) == 1


def leave(sim: Simulation, name: str) -> None:
    sim[name].shutdown()


def test_an_error_in_a_later_attempt_says_which_it_was() -> None:
    def program(sim: Simulation) -> None:
        with pytest.raises(DeadlineExceeded) as caught:
            rpc.rpc_sync("b", slow, (1,), timeout=4.0)
        assert caught.value.__notes__ == ["This was attempt 2. The worker was lost in those before, and replaced."]

    story(1, program, back_after=2.0)


def test_an_attempt_that_runs_is_cancelled() -> None:
    def program(sim: Simulation) -> None:
        future = rpc.rpc_async("b", slow, (1,))
        sim.sleep(0.5)
        assert future.cancel()
        with pytest.raises(CallCancelled):
            future.wait()
        sim.sleep(20.0)

    story(1, program)
    assert runs == ["b"]


def test_callbacks_and_awaits_see_one_call() -> None:
    seen: list[Any] = []

    def program(sim: Simulation) -> Any:
        future = rpc.rpc_async("b", slow, (5,))
        future.add_done_callback(lambda done: seen.append(done.value()))
        with pytest.raises(RuntimeError, match="only be marked completed once"):
            future.set_result(1)
        return future.then(lambda done: done.value() + 1).wait()

    assert story(1, program) == 6
    assert seen == [5]


@pytest.mark.parametrize("seed", SEEDS)
def test_the_loss_of_a_worker_that_the_function_called_is_its_result(seed: int) -> None:
    def program(sim: Simulation) -> None:
        with pytest.raises((WorkerLost, RemoteError), match="'c' is lost"):
            rpc.rpc_sync("b", call_next, (1,))
        sim.sleep(10.0)

    story(seed, program, victim="c")
    assert runs == ["b", "c"]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("victim", ["b", "c"])
def test_a_nested_call_is_made_again_by_the_worker_that_made_it(seed: int, victim: str) -> None:
    assert story(seed, lambda sim: rpc.rpc_sync("b", call_next_idempotent, (1,)), victim=victim) == 1
    assert runs.count("b") == (2 if victim == "b" else 1)
    assert runs.count("c") == 2


@pytest.mark.parametrize(
    ("value", "change"),
    [
        ([1], lambda value: value.append(2)),
        (torch.ones(3), lambda value: value.add_(1)),
        (numpy.ones(3), lambda value: value.fill(2)),
        ({"x": [torch.ones(3)]}, lambda value: value["x"].append(torch.ones(3))),
    ],
    ids=["list", "tensor", "array", "nested"],
)
def test_arguments_that_were_changed_are_not_sent_again(value: Any, change: Callable[[Any], object]) -> None:
    def program(sim: Simulation) -> None:
        future = rpc.rpc_async("b", slow, (value,))
        change(value)
        with pytest.raises(WorkerLost, match="in 1 attempt, and not again because its arguments were changed since"):
            future.wait()

    story(1, program)
    assert runs == ["b"]


class Exits:
    """A value that ends the program when it is pickled for the third time, to compare it; or when it is unpickled."""

    def __init__(self, *, unpickled: bool = False) -> None:
        self.unpickled = unpickled
        self.pickled = 0

    def __reduce__(self) -> Any:
        self.pickled += 1
        if self.pickled > 2:
            raise SystemExit(3)
        return (sys.exit, (3,)) if self.unpickled else (int, (3,))


@telegrad.idempotent
def make_exits() -> Exits:
    return Exits(unpickled=True)


def test_a_value_that_ends_the_program_does_not_leave_others_waiting() -> None:
    text = "a value of the call raised SystemExit when it was pickled or unpickled"

    def program(sim: Simulation) -> None:
        with pytest.raises(PayloadError, match=text):
            rpc.rpc_async("c", make_exits, timeout=0).wait(60)
        future = rpc.rpc_async("b", slow, (Exits(),), timeout=0)
        with pytest.raises(PayloadError, match=text):
            future.wait(60)

    story(1, program)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("call", [rpc.rpc_sync, lambda *args: rpc.rpc_async(*args).wait()], ids=["sync", "async"])
def test_gradients_are_those_of_one_process(seed: int, call: Callable[..., Any]) -> None:
    """The send of the lost attempt gets no gradient, wherever it is in the graph."""

    def program(sim: Simulation) -> list[torch.Tensor]:
        x = torch.tensor([1.0, 2.0], requires_grad=True)
        w = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
        with autograd.context() as context:
            inner = rpc.rpc_sync("c", torch.mul, (x, w))
            outer = call("b", triple, (inner * x,))
            autograd.backward(context, [(outer * inner).sum()])
            gradients = autograd.get_gradients(context)
        return [gradients[x], gradients[w]]

    found = story(seed, program)
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    w = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
    inner = x * w
    (3 * (inner * x) * inner).sum().backward()
    assert runs == ["b", "b"]
    assert x.grad is not None
    assert w.grad is not None
    assert [each.tolist() for each in found] == [x.grad.tolist(), w.grad.tolist()]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("call", [rpc.rpc_sync, lambda *args: rpc.rpc_async(*args).wait()], ids=["sync", "async"])
def test_references_in_the_arguments_are_shared_again_and_released(seed: int, call: Callable[..., Any]) -> None:
    def program(sim: Simulation) -> None:
        mine, other = rpc.RRef([1, 2]), rpc.remote("c", list, ((3, 4),))
        assert call("b", fetch, (mine,)) == [1, 2]
        assert call("b", fetch, (other,)) == [3, 4]
        del mine, other
        sim.sleep(60.0)
        for name in ("a", "b", "c"):
            assert sim[name].references.counts()["values"] == 0, name

    story(seed, program)
    assert len(runs) == 3


@telegrad.idempotent
def triple_through_another(x: torch.Tensor) -> torch.Tensor:
    return run_slowly(rpc.rpc_sync("c", torch.mul, (x, torch.tensor(3.0))) + 0 * x)


@pytest.mark.parametrize("seed", SEEDS)
def test_gradients_are_right_if_the_lost_attempt_had_made_calls_in_the_context(seed: int) -> None:
    def program(sim: Simulation) -> Any:
        x = torch.tensor([1.0, 2.0], requires_grad=True)
        with autograd.context() as context:
            y = rpc.rpc_sync("b", triple_through_another, (x.square(),))
            autograd.backward(context, [(y * x).sum()])
            found = autograd.get_gradients(context)[x].tolist()
        sim.sleep(60.0)
        for name in ("a", "b", "c"):
            assert not sim[name].autograd.contexts.all(), f"{name} keeps a context"
        return found

    found = story(seed, program)
    assert runs == ["b", "b"]
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    (3 * x.square() * x).sum().backward()
    assert x.grad is not None
    assert found == x.grad.tolist()


@telegrad.expose(name="retried-in-registered-mode")
@telegrad.idempotent
def exposed_slow(value: Any) -> Any:
    return run_slowly(value)


@pytest.mark.parametrize("function", [exposed_slow, "retried-in-registered-mode"])
@pytest.mark.parametrize("call", [rpc.rpc_sync, lambda *args: rpc.rpc_async(*args).wait()], ids=["sync", "async"])
def test_exposed_functions_are_called_again_in_registered_mode(call: Callable[..., Any], function: Any) -> None:
    settings = AgentSettings(accept="registered")
    assert story(1, lambda sim: call("b", function, ([1, 2],)), settings=settings) == [1, 2]
    assert runs == ["b", "b"]


@pytest.mark.parametrize("wrong", [abs, torch.nn.Linear(1, 1), partial(print), [].append, dict])
def test_only_functions_written_in_python_can_be_marked(wrong: Any) -> None:
    with pytest.raises(TypeError, match="not a function written in Python"):
        telegrad.idempotent(wrong)
