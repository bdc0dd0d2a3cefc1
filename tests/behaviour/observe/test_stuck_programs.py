"""Programs that wait for ever: what is stuck, and the error of a deadline, name the cycle, or what is missing."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import pytest
import torch
from tests.support.processes import wait_until

from telegrad import autograd, observe, rpc
from telegrad.agent.agent import Agent
from telegrad.default_agent import acting_as
from telegrad.errors import DeadlineExceeded
from telegrad.observe.explain import Explainer
from telegrad.observe.gather import gather
from telegrad.observe.model import ViewRequest
from telegrad.observe.stuck import StuckReport, analyze
from telegrad.observe.stuck_text import render
from telegrad.testing.group import local_group

Group = dict[str, Agent]
TIMEOUT = 2.0


@contextmanager
def explaining_group() -> Iterator[Group]:
    """Run workers a, b and c, act as c, and explain deadlines of any length."""
    with local_group(["a", "b", "c"]) as group:
        for agent in group.values():
            explainer = agent.client.completion.explainer
            assert isinstance(explainer, Explainer)
            explainer.patience = 0.1
        with acting_as(group["c"]):
            yield group


def report_when(agent: Agent, condition: Callable[[StuckReport], object]) -> StuckReport:
    """Look until the report is as expected."""
    reports: list[StuckReport] = []

    def look() -> bool:
        reports.append(analyze(gather(agent, ViewRequest(stacks=True))))
        return bool(condition(reports[-1]))

    wait_until(look)
    return reports[-1]


def notes_of(error: BaseException | None) -> str:
    """Return the notes that a traceback of an error shows."""
    if error is None:
        return ""
    return "\n".join([*getattr(error, "__notes__", ()), notes_of(error.__cause__)])


class Work:
    """Computes a value that needs another one."""

    def __init__(self) -> None:
        self.met = threading.Event()

    def meet(self, other: Any) -> None:
        self.other = other
        self.met.set()

    def wait_for_the_other(self) -> Any:
        assert self.met.wait(60)
        return self.other.to_here(timeout=0)


def test_two_functions_that_wait_for_the_value_of_the_other_are_a_cycle() -> None:
    with explaining_group() as group:
        first, second = rpc.remote("a", Work), rpc.remote("b", Work)
        results = first.remote(timeout=0).wait_for_the_other(), second.remote(timeout=0).wait_for_the_other()
        first.rpc_sync().meet(results[1])
        second.rpc_sync().meet(results[0])
        report = report_when(group["c"], lambda report: report.cycles)
        with pytest.raises(DeadlineExceeded) as caught:
            results[0].to_here(timeout=TIMEOUT)
    (cycle,) = report.cycles
    steps = {step.worker: step for step in cycle if step.function == "Work.wait_for_the_other"}
    assert set(steps) == {"a", "b"}
    for step in steps.values():
        assert re.search(r"test_stuck_programs\.py:\d+ in wait_for_the_other", step.where)
    for text in (render(report), notes_of(caught.value)):
        assert "WAIT CYCLE of 4" in text
        assert "Work.wait_for_the_other on worker 'a'" in text
        assert "Work.wait_for_the_other on worker 'b'" in text
        assert re.search(r"test_stuck_programs\.py:\d+ in wait_for_the_other", text)


class Caller:
    """Calls another worker, which calls back."""

    def call(self, itself: Any) -> int:
        result: int = rpc.rpc_sync("b", call_back, (itself,))
        return result

    def answer(self) -> int:
        return 1


def call_back(actor: Any) -> int:
    result: int = actor.rpc_sync().answer()
    return result


def test_the_outermost_deadline_names_the_cycle_if_the_others_serve_in_shutdown() -> None:
    """As in most programs: only one worker has something to do, and the others are in shutdown() meanwhile."""
    with explaining_group() as group:
        serving = [threading.Thread(target=group[name].shutdown) for name in "ab"]
        for thread in serving:
            thread.start()
        wait_until(lambda: all(group[name].shutdown_protocol.begun for name in "ab"))
        actor = rpc.remote("a", Caller, ordered=True)
        try:
            with pytest.raises(DeadlineExceeded) as caught:
                actor.rpc_sync(timeout=TIMEOUT).call(actor)
            text = notes_of(caught.value)
        finally:
            del actor
            group["c"].shutdown(timeout=30)
            for thread in serving:
                thread.join(30)
    assert "WAIT CYCLE of 3" in text
    assert "Caller.call on worker 'a'" in text
    assert re.match(r"call\(\) of RRef\(.*: call \d+ of call\(\) of a remote object", str(caught.value))
    assert caught.value.__cause__ is None


class Selfish:
    """Calls itself."""

    def meet(self, itself: Any) -> None:
        self.itself = itself

    def call_itself(self) -> int:
        result: int = self.itself.rpc_sync(timeout=0).answer()
        return result

    def answer(self) -> int:
        return 1


def test_an_ordered_actor_that_calls_itself_is_a_cycle() -> None:
    with explaining_group() as group:
        actor = rpc.remote("a", Selfish, ordered=True)
        actor.rpc_sync().meet(actor)
        future = actor.rpc_async(timeout=TIMEOUT).call_itself()
        report = report_when(group["c"], lambda report: report.cycles)
        with pytest.raises(DeadlineExceeded) as caught:
            future.wait()
    (cycle,) = report.cycles
    assert {step.worker for step in cycle} == {"a"}
    for text in (render(report), notes_of(caught.value)):
        assert "WAIT CYCLE of 2" in text
        assert "Selfish.call_itself on worker 'a'" in text
        assert "its turn at an ordered object, which runs Selfish.call_itself" in text
        assert re.search(r"test_stuck_programs\.py:\d+ in call_itself", text)


class Courier:
    """Has another worker call back, and waits for that, or not."""

    made: ClassVar[list[Courier]] = []
    """All workers of the tests are in this process."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.made.append(self)

    def meet(self, itself: Any) -> None:
        self.itself = itself

    async def send(self, how: str) -> int:
        reply = rpc.rpc_async("b", answer_of, (self.itself,), timeout=0)
        if how == "await":
            return await reply
        if how == "await then":
            return await reply.then(lambda future: future.value())
        self.loop = asyncio.get_running_loop()
        await asyncio.wait_for(self.go.wait(), 60)
        return 0

    def answer(self) -> int:
        return 1


def answer_of(actor: Any) -> Any:
    return actor.rpc_sync(timeout=0).answer()


@pytest.mark.parametrize("how", ["await", "await then"])
def test_a_coroutine_that_awaits_a_call_back_to_its_ordered_actor_is_a_cycle(how: str) -> None:
    with explaining_group() as group:
        actor = rpc.remote("a", Courier, ordered=True)
        actor.rpc_sync().meet(actor)
        future = actor.rpc_async(timeout=TIMEOUT).send(how)
        report = report_when(group["c"], lambda report: report.cycles)
        assert any(step.function == "Courier.send" for step in report.cycles[0])
        with pytest.raises(DeadlineExceeded):
            future.wait()


def test_a_coroutine_that_has_made_a_call_and_waits_for_something_else_is_in_no_cycle() -> None:
    with explaining_group() as group:
        actor = rpc.remote("a", Courier, ordered=True)
        actor.rpc_sync().meet(actor)
        future = actor.rpc_async(timeout=60).send("forget")
        report = report_when(group["c"], lambda report: "its turn at an ordered object" in render(report))
        assert report.cycles == ()
        assert re.search(r"at .*test_stuck_programs\.py:\d+ in send", render(report))  # no thread is there
        courier = Courier.made[-1]
        courier.loop.call_soon_threadsafe(courier.go.set)
        assert future.wait() == 0  # so there was none


def test_a_barrier_names_the_worker_that_never_comes_and_what_that_does() -> None:
    with explaining_group() as group:
        errors: list[BaseException] = []

        def enter(agent: Agent) -> None:
            try:
                agent.gather(timeout=TIMEOUT, what="barrier()")
            except DeadlineExceeded as error:
                errors.append(error)

        threads = [threading.Thread(target=enter, args=(group[name],)) for name in "ab"]
        for thread in threads:
            thread.start()
        text = "waits for worker 'c' to join a collective"
        report = report_when(group["c"], lambda report: render(report).count(text) == 2)
        for thread in threads:
            thread.join()
    assert not report.cycles
    assert re.search(r"main thread of worker 'c' is at .*test_stuck_programs\.py:\d+", render(report))
    assert len(errors) == 2
    for error in errors:
        assert "worker 'c' did not join barrier()" in str(error)
        assert text in notes_of(error)


class Blocked(torch.autograd.Function):
    """A function whose backward waits."""

    entered, released = threading.Event(), threading.Event()

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        Blocked.entered.set()
        assert Blocked.released.wait(60)
        return grads[0]


def blocked(tensor: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = Blocked.apply(tensor)
    return result


def test_a_gate_says_which_gradient_it_waits_for() -> None:
    with explaining_group() as group:
        Blocked.entered.clear()
        Blocked.released.clear()
        leaf = torch.ones(2, requires_grad=True)
        with autograd.context() as context:
            shared = leaf * 2
            loss = (rpc.rpc_sync("b", blocked, (shared,)) + shared).sum()
            failures: list[BaseException] = []

            def backward() -> None:
                with acting_as(group["c"]):
                    try:
                        autograd.backward(context, [loss], timeout=TIMEOUT)
                    except DeadlineExceeded as error:
                        failures.append(error)

            thread = threading.Thread(target=backward)
            thread.start()
            try:
                text = re.compile(r"a gate waits for the gradient of message 0x[0-9a-f]+ from worker 'b'")
                report = report_when(group["c"], lambda report: text.search(render(report)))
                thread.join()
            finally:
                Blocked.released.set()
    assert any(node.kind == "pass" and node.worker == "c" for node in report.roots)
    assert len(failures) == 1
    assert text.search(notes_of(failures[0]))
    assert re.search(r"test_stuck_programs\.py:\d+ in backward: assert Blocked", notes_of(failures[0]))


def test_a_deadline_that_passes_just_after_another_says_which_error_explains() -> None:
    release = threading.Event()
    blockers[id(release)] = release
    try:
        with explaining_group():
            errors = []
            for _ in range(2):
                with pytest.raises(DeadlineExceeded) as caught:
                    rpc.rpc_sync("a", block, (id(release),), timeout=0.2)
                errors.append(caught.value)
            release.set()
    finally:
        release.set()
        del blockers[id(release)]
    assert notes_of(errors[0]).startswith(f"What call {errors[0].call} of ")
    text = notes_of(errors[1])
    assert text.startswith(f"What call {errors[1].call} of ")
    assert "worker 'c' had looked at the group less than 5 s before" in text
    assert f"in the error of call {errors[0].call} of " in text


def test_dump_writes_what_is_in_progress(capsys: pytest.CaptureFixture[str]) -> None:
    with explaining_group():
        actor = rpc.remote("a", Selfish, ordered=True)
        actor.rpc_sync().meet(actor)
        future = actor.rpc_async(timeout=TIMEOUT).call_itself()
        wait_until(lambda: "WAIT CYCLE" in observe.report(0.0))
        observe.dump()
        with pytest.raises(DeadlineExceeded):
            future.wait()
    assert "Selfish.call_itself on worker 'a'" in capsys.readouterr().err


def test_a_worker_whose_functions_all_block_still_describes_itself() -> None:
    release = threading.Event()
    blockers[id(release)] = release
    try:
        with explaining_group() as group:
            futures = [rpc.rpc_async("a", block, (id(release),)) for _ in range(40)]  # more than may run at once

            def all_run() -> bool:
                view = gather(group["c"], ViewRequest(stacks=True), timeout=20)
                (worker,) = [each for each in view.workers if each.name == "a"]
                states = [call.state for call in worker.served]
                return states.count("running") == 16 and states.count("queued") == 24

            wait_until(all_run)
            release.set()
            for future in futures:
                assert future.wait() is None
    finally:
        release.set()
        del blockers[id(release)]


blockers: dict[int, threading.Event] = {}


def block(key: int) -> None:
    """Block without telegrad's knowledge."""
    assert blockers[key].wait(60)
