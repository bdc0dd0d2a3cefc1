"""Races between threads, passes and workers, each forced to happen."""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.support.one_process import gradients_on, wait_until

from telegrad import autograd
from telegrad.backward import engine, passes
from telegrad.backward.contexts import current
from telegrad.backward.graph import Fed
from telegrad.backward.island_engine import IslandEngine
from telegrad.backward.nodes import SendRpcBackward
from telegrad.backward.pass_run import PassRun
from telegrad.calls import pipeline
from telegrad.calls.oneway import OneWay
from telegrad.default_agent import acting_as
from telegrad.errors import BackwardError, DeadlineExceeded, PayloadError, ProtocolError, TelegradError, WorkerLost
from telegrad.rpc import api
from telegrad.testing.group import local_group
from telegrad.testing.scheduler import SimRuntime
from telegrad.testing.simulation import Simulation
from telegrad.wire.messages import (
    NONE,
    AbortPass,
    PassFailure,
    PassInfo,
    ProbeReq,
    PropagateGradientsReq,
    PropagateGradientsResp,
    ResumeReq,
)

LONG = 30.0  # seconds; a test that hangs would hang for ever


class Then(torch.autograd.Function):
    """A function whose backward runs an action."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, action: Callable[[], None]) -> torch.Tensor:
        ctx.action = action
        return x * 1

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.action()
        return grads[0] * 1, None


def raising(error: BaseException) -> Callable[[], None]:
    def action() -> None:
        raise error

    return action


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError("this error has no text")


def make_weight() -> torch.Tensor:
    return torch.ones(3, requires_grad=True)


@pytest.mark.parametrize("error", [Mute(), SystemExit(3), KeyboardInterrupt()], ids=lambda error: type(error).__name__)
def test_any_exception_in_a_backward_function_ends_the_pass(error: BaseException) -> None:
    with local_group(["a", "b"]) as group, acting_as(group["a"]):
        group["b"].register("f", lambda: Then.apply(make_weight(), raising(error)))
        with autograd.context() as context_id:
            y = group["a"].call("b", "@f")
            with pytest.raises(BackwardError, match=type(error).__name__):
                autograd.backward(context_id, [y.sum()], timeout=LONG)


def test_an_interrupt_in_an_island_of_the_caller_is_raised_unchanged() -> None:
    with local_group(["a", "b"]) as group, acting_as(group["a"]):
        with autograd.context() as context_id:
            y = Then.apply(make_weight(), raising(KeyboardInterrupt()))
            with pytest.raises(KeyboardInterrupt):
                autograd.backward(context_id, [y.sum()], timeout=LONG)


def test_a_gradient_message_that_cannot_be_read_fails_the_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        raise ProtocolError("a descriptor names bytes that are not there")

    weight = make_weight()
    with local_group(["a", "b"]) as group, acting_as(group["a"]):
        group["b"].register("f", lambda: weight * 2)
        with autograd.context() as context_id:
            y = group["a"].call("b", "@f")
            monkeypatch.setattr(pipeline, "decode_tensors", fail)
            with pytest.raises(BackwardError, match="descriptor"):
                autograd.backward(context_id, [y.sum()], timeout=LONG)
            assert group["a"].activity() == []


def test_a_context_that_ends_while_gradients_arrive_leaves_no_thread_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    check, weight = SendRpcBackward.check, make_weight()
    with local_group(["a", "b"]) as group, acting_as(group["a"]):

        def check_and_release(self: SendRpcBackward, *args: Any) -> None:
            check(self, *args)
            contexts = group["b"].autograd.contexts
            contexts.release(contexts.all()[0])

        monkeypatch.setattr(SendRpcBackward, "check", check_and_release)
        group["b"].register("f", lambda: weight * 2)
        with autograd.context() as context_id:
            y = group["a"].call("b", "@f")
            with pytest.raises(TelegradError, match="left"):
                autograd.backward(context_id, [y.sum()], timeout=LONG)
            assert group["a"].activity() == []


def test_a_probe_for_a_tensor_that_was_never_sent_is_replied_to_and_so_are_later_messages() -> None:
    sim, weight = Simulation(1, ["a", "b"]), make_weight()

    def main() -> int:
        a, answers = sim["a"], []
        sim["b"].register("f", lambda: weight * 2)
        with acting_as(a), autograd.context() as context_id:
            y = a.call("b", "@f")
            (message,) = sim["b"].autograd.contexts.get(context_id).sends
            about = PassInfo(int(context_id), 5, False, False, 0)
            a.handle(PropagateGradientsResp, lambda channel, answer, data: answers.append(answer))
            a.tell(1, ProbeReq(1, about, message, (7, -1)))
            sim.sleep(1)
            a.tell(1, ResumeReq(2, about))
            sim.sleep(1)
            del y
        return len(answers)

    with sim:
        assert sim.run(main) == 2


def test_a_gradient_that_arrives_after_the_pass_failed_is_replied_to() -> None:
    sim, weight = Simulation(1, ["a", "b"]), make_weight()

    def main() -> list[Any]:
        answers: list[Any] = []
        sim["b"].register("f", lambda x: Then.apply(weight * x, raising(ValueError("no"))))
        with acting_as(sim["a"]), autograd.context() as context_id:
            y = sim["a"].call("b", "@f", (make_weight(),))
            with pytest.raises(BackwardError):
                autograd.backward(context_id, [y.sum()])
            context = sim["a"].autograd.contexts.get(context_id)
            ((message, _),) = context.sends.items()
            (run,) = context.passes.values()
            sim["b"].handle(PropagateGradientsResp, lambda channel, answer, data: answers.append(answer))
            sim["b"].tell(0, PropagateGradientsReq(9, run.info, message, (NONE,), False, (), None))
            sim.sleep(1)
            assert sim["b"].activity() == []
        return answers

    with sim:
        assert len(sim.run(main)) == 1


def test_a_pass_that_begins_elsewhere_is_refused_while_this_one_is_idle_on_a_worker_they_share() -> None:
    """Worker b has half of the entries of its island and is idle, yet it takes part in the first pass."""
    sim, weight = Simulation(3, ["a", "b", "c", "d"]), make_weight()
    shared: dict[str, Any] = {}
    outcome: dict[str, Any] = {}

    def one() -> torch.Tensor:
        shared["h"] = weight * 2
        return shared["h"] * 3

    def slowly() -> None:
        shared["slow"].set()
        sim["c"].executor.wait(shared["go on"], None)

    def begin_elsewhere(context_id: int) -> str:
        y = sim["d"].call("b", "@other")
        try:
            sim["d"].autograd.backward(context_id, [y.sum()])
        except BackwardError as error:
            return str(error)
        return "success"

    def disturb(context_id: int) -> None:
        shared["slow"].wait(None)
        sim.sleep(1)
        token = current.set(sim["a"].autograd.contexts.get(context_id))
        outcome["elsewhere"] = sim["a"].call("d", "@begin", (int(context_id),), timeout=20)
        current.reset(token)
        shared["go on"].set()

    def program() -> None:
        with autograd.context() as context_id:
            y, z = sim["a"].call("b", "@one"), sim["a"].call("c", "@slow")
            other = sim.spawn("a", lambda: disturb(context_id))
            try:
                autograd.backward(context_id, [y.sum() + z.sum()], timeout=100)
            except DeadlineExceeded as error:
                outcome["first"] = error
            other.join(None)
            outcome["grad"] = sim["b"].autograd.contexts.get(context_id).gradients.get(weight)

    def main() -> None:
        runtime = SimRuntime(sim.scheduler, "c")
        shared["slow"], shared["go on"] = runtime.event(), runtime.event()
        sim["b"].register("one", one)
        sim["b"].register("two", lambda: shared["h"] * 5)
        sim["b"].register("other", lambda: weight * 7)
        sim["c"].register("slow", lambda: Then.apply(sim["c"].call("b", "@two"), slowly))
        sim["d"].register("begin", begin_elsewhere)
        sim.spawn("a", program).join(None)

    with sim:
        sim.run(main)
    assert "first" not in outcome
    assert "another pass" in outcome["elsewhere"]
    assert outcome["grad"].tolist() == [16.0] * 3


def test_of_two_threads_that_call_backward_in_one_context_one_gets_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drive, other_was_told, weight = engine.drive, threading.Event(), make_weight()
    outcomes: list[str] = []

    def drive_together(run: PassRun, deadline: float | None) -> Any:
        other_was_told.wait(LONG / 2)
        return drive(run, deadline)

    monkeypatch.setattr(engine, "drive", drive_together)
    with local_group(["a", "b"]) as group, acting_as(group["a"]), autograd.context() as context_id:
        group["b"].register("f", lambda: weight * 2)
        y = group["a"].call("b", "@f")

        def run() -> None:
            try:
                group["a"].autograd.backward(context_id, [y.sum()], True, timeout=LONG)
                outcomes.append("success")
            except TelegradError as error:
                outcomes.append(str(error))
                other_was_told.set()

        threads = [threading.Thread(target=run) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert any("is running on this worker already" in outcome for outcome in outcomes)
    assert "success" in outcomes


def test_an_island_of_a_pass_that_failed_does_not_forget_the_gradients_of_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    set_grads, weight = SendRpcBackward.set_grads, make_weight()
    old_runs, old_may_end, old_has_ended = threading.Event(), threading.Event(), threading.Event()
    sets: list[Any] = []
    runs: list[int] = []

    def action() -> None:
        runs.append(1)
        if len(runs) == 1:
            old_runs.set()
            old_may_end.wait(LONG)

    def set_and_wait(self: SendRpcBackward, grads: Any) -> None:
        set_grads(self, grads)
        if grads is not None:
            sets.append(grads)
            if len(sets) == 2:  # the second pass has set them, and the engine has not begun
                old_may_end.set()
                old_has_ended.wait(LONG)

    forget = Fed.forget

    def forget_and_tell(self: Fed) -> None:
        forget(self)
        old_has_ended.set()

    monkeypatch.setattr(SendRpcBackward, "set_grads", set_and_wait)
    monkeypatch.setattr(Fed, "forget", forget_and_tell)
    monkeypatch.setattr(IslandEngine, "_entered", lambda *_: None)  # so that gradients are set on tokens
    with local_group(["a", "b"]) as group, acting_as(group["a"]), autograd.context() as context_id:
        group["b"].register("f", lambda: Then.apply(weight * 2, action))
        y = group["a"].call("b", "@f")
        context = group["a"].autograd.contexts.retrieve(context_id)

        def stop_the_old() -> None:
            assert old_runs.wait(LONG)
            for run in list(context.passes.values()):
                run.fail(TelegradError("stopped by the test"))

        stopper = threading.Thread(target=stop_the_old)
        stopper.start()
        with pytest.raises(TelegradError, match="stopped by the test"):
            autograd.backward(context_id, [y.sum()], retain_graph=True, timeout=LONG)
        stopper.join()
        autograd.backward(context_id, [y.sum()], timeout=LONG)


def test_a_call_that_never_left_does_not_keep_the_context_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    sim = Simulation(1, ["a", "b"])

    def encode_tensors(*_: Any, **__: Any) -> Any:
        raise PayloadError("it cannot be laid out")

    def main() -> dict[str, int]:
        with acting_as(sim["a"]):
            with autograd.context():
                sim["a"].call("b", operator.mul, (make_weight(), 2))
                with monkeypatch.context() as patch:
                    patch.setattr(pipeline, "encode_tensors", encode_tensors)
                    with pytest.raises(PayloadError):
                        sim["a"].call("b", operator.mul, (make_weight(), 2))
            sim.sleep(1)
        info: dict[str, int] = sim["b"].autograd.debug_info()
        return info

    with sim:
        assert sim.run(main)["num_autograd_contexts"] == 0


def test_the_loss_of_one_worker_does_not_make_the_others_lose_each_other() -> None:
    """a calls b, b calls c, c calls a. Each reports the loss of x to its caller, to which it has no connection."""
    sim = Simulation(5, ["a", "b", "c", "x"], resumable=False)
    leaves = {name: make_weight() for name in "abcx"}
    go_on: dict[str, Any] = {}
    outcome: dict[str, Any] = {}

    def body(name: str, next_one: str) -> torch.Tensor:
        # Made first, so the engine runs it last: the gradients of the calls were sent when it waits.
        slow: Any = 0
        if name != "a":
            slow = Then.apply(leaves[name], lambda: sim[name].executor.wait(go_on[name], None))
        result = sim[name].call("x", "@x") * leaves[name]
        if next_one:
            result = result + sim[name].call(next_one, "@f")
        return result + slow

    def kill() -> None:
        sim.sleep(1)
        outcome["killed"] = sim.scheduler.now
        sim.kill("x")

    def program() -> None:
        with autograd.context() as context_id:
            y = body("a", "b")
            killer = sim.spawn("a", kill)
            with pytest.raises(WorkerLost, match="'x'"):
                autograd.backward(context_id, [y.sum()])
            outcome["after"] = sim.scheduler.now - outcome["killed"]
            killer.join(None)
            sim.sleep(0.01)
            for name in "bc":
                assert sim["a"].call(name, operator.add, (1, 2), timeout=5) == 3
        for event in go_on.values():
            event.set()

    def main() -> None:
        for name in "bc":
            go_on[name] = SimRuntime(sim.scheduler, name).event()
        sim["x"].register("x", lambda: leaves["x"] * 2)
        sim["a"].register("f", lambda: body("a", ""))
        sim["b"].register("f", lambda: body("b", "c"))
        sim["c"].register("f", lambda: body("c", "a"))
        sim.spawn("a", program).join(None)

    with sim:
        sim.run(main)
    assert outcome["after"] < 3


def test_an_error_while_the_last_gradient_of_an_island_is_packed_ends_the_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    sim = Simulation(1, ["a", "b"])
    send = OneWay.send_gradients

    def fails(self: OneWay, to: int, make_head: Any, *args: Any, **options: Any) -> Any:
        if isinstance(make_head, partial) and "response" in make_head.keywords:
            raise RuntimeError("it cannot be packed")
        return send(self, to, make_head, *args, **options)

    def main() -> str:
        with acting_as(sim["a"]), autograd.context() as context_id:
            y = sim["a"].call("b", operator.mul, (make_weight(), 2))
            with pytest.raises(BackwardError) as caught:
                autograd.backward(context_id, [y.sum()])
        return str(caught.value)

    monkeypatch.setattr(OneWay, "send_gradients", fails)
    with sim:
        assert "it cannot be packed" in sim.run(main)


def test_a_message_of_an_old_pass_may_arrive_while_the_next_begins() -> None:
    """A worker reports that the last pass failed while this one checks whether any pass is running."""
    weight = make_weight()
    with local_group(["a", "b"]) as group, acting_as(group["a"]), autograd.context() as context_id:
        context = group["a"].autograd.contexts.get(context_id)
        assert context is not None

        class Old:
            """Let another thread add a tombstone meanwhile."""

            @property
            def busy(self) -> bool:
                context.passes[len(context.passes) + 1] = Old()  # type: ignore[assignment]  # it stands for a pass
                return False

        context.passes = {1: Old(), 2: Old()}  # type: ignore[dict-item]
        autograd.backward(context_id, [(weight * 2).sum()])
        assert torch.equal(context.gradients.get(weight), torch.full_like(weight, 2.0))


def test_an_abort_is_not_lost_where_the_pass_just_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """The abort of a pass arrives on one thread while another makes the pass for its first gradient."""
    with local_group(["a", "b"]) as group, acting_as(group["a"]), autograd.context() as context_id:
        x = torch.ones(3, requires_grad=True)
        y = api.rpc_sync("b", operator.neg, (x,))
        there = group["b"].autograd
        context = there.contexts.get(int(context_id))
        assert context is not None
        about = PassInfo(int(context_id), 77, False, False, 0)
        abort = AbortPass(about, PassFailure(0, "given up", ""))
        told: list[threading.Thread] = []
        make = passes.PassRun

        def make_slowly(*args: Any) -> PassRun:
            if not told:
                tell = partial(there.handlers.on_abort, None, abort, SimpleNamespace(data=b""))
                told.append(threading.Thread(target=tell))
                told[0].start()
                told[0].join(0.2)  # it waits until the pass exists
            return make(*args)

        monkeypatch.setattr(passes, "PassRun", make_slowly)
        run = there.passes.find(0, 0, about)
        told[0].join(LONG)
        assert run is not None
        assert "given up" in str(run.failure)
        del y


def test_a_call_whose_caller_was_lost_before_it_is_served_leaves_no_context(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only its caller could have ended the context, and a loss is not reported twice."""
    with local_group(["a", "b", "c"]) as group, acting_as(group["a"]):
        b, c = group["b"], group["c"]
        contexts = c.autograd.contexts
        enter = contexts.enter

        def enter_late(*args: Any) -> Any:
            b.close()
            wait_until(lambda: c.peers.find("b").gone != "")
            return enter(*args)

        monkeypatch.setattr(contexts, "enter", enter_late)
        b.register("f", lambda: b.call("c", "@g"))
        c.register("g", make_weight)
        with autograd.context():
            with pytest.raises(TelegradError):
                group["a"].call("b", "@f", timeout=LONG)
            wait_until(lambda: not c.activity())
        wait_until(lambda: not c.autograd.contexts.all())


def test_the_loss_of_a_worker_does_not_end_a_context_that_another_just_began(monkeypatch: pytest.MonkeyPatch) -> None:
    with local_group(["a", "b", "c"]) as group, acting_as(group["a"]):
        contexts = group["b"].autograd.contexts
        begin = contexts.enter

        def enter_and_lose(*args: Any) -> Any:
            context = begin(*args)
            contexts.worker_lost(2)
            return context

        monkeypatch.setattr(contexts, "enter", enter_and_lose)
        weight = make_weight()
        group["b"].register("f", lambda: weight * 2)
        with autograd.context() as context_id:
            y = group["a"].call("b", "@f")
            autograd.backward(context_id, [y.sum()], timeout=LONG)
            assert torch.equal(gradients_on(group["b"], context_id)[weight], torch.full((3,), 2.0))
