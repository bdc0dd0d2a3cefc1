"""A pass that fails raises at its caller, frees everything everywhere, and the group stays usable."""

from __future__ import annotations

import os
import resource
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.stalls import Stalls

import telegrad
from telegrad import autograd, launch, rpc
from telegrad.agent.agent import Agent
from telegrad.backward import incoming
from telegrad.backward.pass_run import PassRun
from telegrad.default_agent import acting_as
from telegrad.errors import BackwardError, DeadlineExceeded, TelegradError, WorkerLost
from telegrad.testing.group import local_group

Group = dict[str, Agent]

STATE = ("num_autograd_contexts", "num_current_backward_passes", "islands_running", "gates_waiting", "sends", "recvs")


@pytest.fixture
def group() -> Iterator[Group]:
    Break.go = threading.Event()
    with local_group(["a", "b", "c"]) as agents:
        with acting_as(agents["a"]):
            yield agents
            Break.go.set()
            nothing_left(agents)


def nothing_left(agents: Group) -> None:
    """Check that nothing of any context is left. Cleanup messages have no reply, so it may take a moment."""
    deadline = time.monotonic() + 10
    while True:
        left = {
            name: {key: value for key, value in agent.autograd.debug_info().items() if key in STATE and value}
            for name, agent in agents.items()
        }
        if not any(left.values()):
            return
        assert time.monotonic() < deadline, f"left behind: {left}"
        threading.Event().wait(0.005)


class Break(torch.autograd.Function):
    """A function whose backward fails or waits."""

    go = threading.Event()

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, how: str) -> torch.Tensor:
        ctx.how = how
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        if ctx.how == "raise":
            raise ValueError("broken on purpose")
        if ctx.how == "raise half":
            raise ValueError("half a character: \ud800")
        if ctx.how == "wait":
            assert Break.go.wait(20)
        return grad * 2, None


def break_there(x: torch.Tensor, how: str) -> torch.Tensor:
    return Break.apply(x, how)


def break_further(x: torch.Tensor, how: str) -> torch.Tensor:
    return rpc.rpc_sync("c", break_there, (x * 3, how)) * 2


@pytest.mark.parametrize("function", [break_there, break_further])
def test_an_error_in_a_backward_elsewhere_names_worker_and_cause(group: Group, function: Any) -> None:
    x = torch.ones(3, requires_grad=True)
    where, number = ("b", 1) if function is break_there else ("c", 2)
    with autograd.context() as context:
        y = rpc.rpc_sync("b", function, (x, "raise"))
        with pytest.raises(
            BackwardError, match=rf"Error on Node {number}: broken on purpose\n\(worker '{where}'"
        ) as caught:
            context.backward(y.sum())
        assert caught.value.worker == where
        assert "in backward" in str(caught.value.__cause__)  # the remote traceback
        assert isinstance(caught.value, RuntimeError)
    with autograd.context() as context:  # the group stays usable
        y = rpc.rpc_sync("b", function, (x, "nothing"))
        context.backward(y.sum())
        assert x in context.gradients


def test_an_error_whose_text_cannot_be_encoded_ends_the_pass(group: Group) -> None:
    x = torch.ones(3, requires_grad=True)
    with autograd.context() as context:
        y = rpc.rpc_sync("b", break_further, (x, "raise half"))
        with pytest.raises(BackwardError, match=r"Error on Node 2: half a character: \\ud800"):
            context.backward(y.sum(), timeout=20)


def test_an_error_in_the_callers_own_backward_is_the_cause(group: Group) -> None:
    x = torch.ones(3, requires_grad=True)
    with autograd.context() as context:
        y = Break.apply(rpc.rpc_sync("b", torch.neg, (x,)), "raise")
        with pytest.raises(BackwardError, match="Error on Node 0: broken on purpose") as caught:
            context.backward(y.sum())
        assert isinstance(caught.value.__cause__, ValueError)


def test_an_error_while_gates_wait_releases_them(group: Group) -> None:
    x = torch.ones(3, requires_grad=True)
    with autograd.context() as context:
        h = x * 2
        y = rpc.rpc_sync("b", break_there, (h, "raise")) + h  # a skip connection: the pass needs gates
        with pytest.raises(BackwardError, match="broken on purpose"):
            context.backward(y.sum(), timeout=20)


def test_a_pass_past_its_deadline_fails_and_says_so(group: Group) -> None:
    x = torch.ones(3, requires_grad=True)
    with autograd.context() as context:
        y = rpc.rpc_sync("b", break_there, (x, "wait"))
        with pytest.raises(DeadlineExceeded, match="did not end before its deadline"):
            context.backward(y.sum(), timeout=0.1)
        Break.go.set()


def test_leaving_the_context_aborts_a_pass_that_runs_in_it(group: Group) -> None:
    x = torch.ones(3, requires_grad=True)
    failed: list[BaseException] = []
    agent = group["a"]
    with autograd.context() as context:
        y = rpc.rpc_sync("b", break_there, (x, "wait")).sum()

        def run() -> None:
            try:
                agent.autograd.backward(int(context), [y])
            except TelegradError as error:
                failed.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        while not group["b"].autograd.debug_info()["islands_running"]:
            threading.Event().wait(0.001)
        with pytest.raises(TelegradError, match="is running on this worker already"):
            context.backward(y)
    thread.join(30)
    assert "was left while a backward pass was running in it" in str(failed[0])


def test_a_pass_that_begins_on_another_worker_while_one_runs_is_refused(group: Group) -> None:
    x = torch.ones(3, requires_grad=True)
    with autograd.context() as context:
        y = rpc.rpc_sync("b", break_there, (x, "wait")).sum()
        first = threading.Thread(target=lambda: group["a"].autograd.backward(int(context), [y], retain_graph=True))
        first.start()
        while not group["b"].autograd.debug_info()["islands_running"]:
            threading.Event().wait(0.001)
        there = group["b"].autograd.contexts.retrieve(context)
        root = next(iter(there.sends.values())).tokens([0])[0]
        with pytest.raises(TelegradError, match="is running on this worker already"):
            group["b"].autograd.backward(int(context), [root])
        Break.go.set()
        first.join(30)
        assert x in context.gradients


def test_a_lost_worker_fails_the_pass_with_its_name(group: Group) -> None:
    x = torch.ones(3, requires_grad=True)
    with autograd.context() as context:
        y = rpc.rpc_sync("b", break_further, (x, "wait"))
        stop = threading.Timer(0.1, lambda: group["c"].close())
        stop.start()
        with pytest.raises(WorkerLost, match="worker 'c' is lost"):
            context.backward(y.sum())
        Break.go.set()
        stop.join()


# -- real kills ---------------------------------------------------------------------------------------------


class Phase:
    """The moment of a pass at which the victim is killed. `arrange` sets it in every process."""

    victim = ""
    moment = ""
    directory = ""

    @staticmethod
    def reached(moment: str) -> bool:
        return Phase.moment == moment and telegrad.get_worker_info().name == Phase.victim

    @staticmethod
    def report_and_wait() -> None:
        Path(Phase.directory, "ready").touch()
        signal.pause()


class Here(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        if Phase.reached("island"):
            Phase.report_and_wait()
        return grad


def arrange(victim: str, moment: str, directory: str) -> None:
    Phase.victim, Phase.moment, Phase.directory = victim, moment, directory
    if moment == "probe" and victim == telegrad.get_worker_info().name:
        probed = incoming.probed

        def stop(run: PassRun, *args: Any) -> None:
            Phase.report_and_wait()
            probed(run, *args)

        incoming.probed = stop


def forward_through(way: list[str], x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    if Phase.reached("forward"):
        Phase.report_and_wait()
    x = Here.apply(x * 2)
    if not way:
        return x, x.exp()  # the second one is never used, so the pass needs the probe
    used, unused = rpc.rpc_sync(way[0], forward_through, (way[1:], x), timeout=0)
    return Here.apply(used + x), unused


def state_here() -> dict[str, int]:
    """Return how many contexts and passes there are in this process."""
    info = telegrad.rpc.default_agent().autograd.debug_info()
    return {key: info[key] for key in STATE if info[key]}


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 30
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} never came"
        threading.Event().wait(0.005)


def be_a_worker(moment: str, victim: str, directory: str) -> dict[str, Any] | None:
    arrange(victim, moment, directory)
    if telegrad.get_worker_info().name != "caller":
        wait_for(Path(directory, "done"))
        return None
    x = torch.ones(3, requires_grad=True)
    for name in ("b", "c", "d"):
        rpc.rpc_sync(name, arrange, (victim, moment, directory))
    error: Exception | None = None
    with autograd.context() as context:
        try:
            used, _ = forward_through(["b", "c", "d"], x)
            if moment == "before":
                Path(directory, "ready").touch()
                wait_for(Path(directory, "killed"))
            context.backward(used.sum())
        except RuntimeError as caught:
            error = caught
    ended = time.time()
    left: dict[str, dict[str, int]] = {}
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        left = {name: rpc.rpc_sync(name, state_here) for name in ("b", "c", "d", "caller") if name != victim}
        if not any(left.values()):
            break
    Path(directory, "done").touch()
    return {"error": repr(error), "type": type(error).__name__, "ended": ended, "left": left}


@pytest.mark.parametrize("victim", ["b", "c", "d"])
@pytest.mark.parametrize("moment", ["forward", "before", "island", "probe"])
def test_a_worker_killed_in_any_phase_fails_the_pass_within_three_seconds(
    moment: str, victim: str, tmp_path: Path
) -> None:
    with (
        Stalls() as stalls,
        launch.start(be_a_worker, ["caller", "b", "c", "d"], (moment, victim, str(tmp_path))) as group,
    ):
        wait_for(tmp_path / "ready")
        killed = time.time()
        group.kill(victim)
        (tmp_path / "killed").touch()
        told = group.join(60)[0]
    assert told["type"] == "WorkerLost", told
    assert f"worker '{victim}'" in told["error"]
    assert not any(told["left"].values()), told["left"]
    assert told["ended"] - killed < 3 + stalls.seconds


# -- leaks --------------------------------------------------------------------------------------------------


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def maybe_break(x: torch.Tensor, how: str) -> torch.Tensor:
    return Break.apply(x.sin(), how)


def many_contexts(count: int, size: int, errors: bool) -> dict[str, Any]:
    if telegrad.get_worker_info().name != "worker0":
        return {}
    memory: dict[str, list[int]] = {"worker0": [], "worker1": []}
    for number in range(count):
        x = torch.ones(size, requires_grad=True)
        with autograd.context() as context:
            y = rpc.rpc_sync("worker1", maybe_break, (x, "raise" if errors and number % 2 else "nothing"))
            rpc.rpc_sync("worker1", torch.neg, (x,))  # not used
            try:
                context.backward(y.sum())
            except BackwardError:
                assert errors
        if number % (count // 5) == count // 5 - 1:
            for name, readings in memory.items():
                readings.append(rpc.rpc_sync(name, resident))
    deadline = time.monotonic() + 10
    while True:
        left = {name: rpc.rpc_sync(name, state_here) for name in memory}
        if not any(left.values()) or time.monotonic() > deadline:
            return {"memory": memory, "left": left, "pid": os.getpid()}


@pytest.mark.parametrize("errors", [False, True])
def test_a_thousand_contexts_leave_memory_flat_and_nothing_behind(
    errors: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MALLOC_ARENA_MAX", "1")  # else each thread of a busy machine adds freed memory that is kept
    told = launch.local(many_contexts, 2, (1000, 256 * 1024, errors), timeout=100)[0]
    assert not any(told["left"].values()), told["left"]
    for name, readings in told["memory"].items():
        # One tensor left by every tenth context would be 80 MB.
        assert readings[-1] - readings[0] < 64 * 2**20, f"{name} grew: {[f'{r / 2**20:.0f} MB' for r in readings]}"
