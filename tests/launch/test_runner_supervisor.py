"""The loop of a launcher whose workers run under runners. Whole groups are tested in tests/behaviour/cluster."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any, cast

import pytest

from telegrad.launch import WorkerFailed, runner_supervisor, ssh
from telegrad.launch.runner_channel import PipeChannel
from telegrad.launch.runner_engine import Engine, Work
from telegrad.launch.runner_messages import (
    MARK,
    STDERR,
    STDOUT,
    Hello,
    HostStore,
    Output,
    Signal,
    Start,
    StoreHosted,
    WorkPart,
    pack,
)
from telegrad.launch.runner_supervisor import RunnerSupervisor
from telegrad.launch.runner_worker import RunnerWorker


def quiet_worker(name: str, rank: int) -> RunnerWorker:
    consumer = SimpleNamespace(feed=lambda piece: None, close=lambda: None)
    return RunnerWorker(name, rank, {STDOUT: consumer, STDERR: consumer})


@pytest.mark.parametrize(
    ("hello", "size"),
    [(Hello(7, "here"), 8), (Hello(0, "here", size=3), 3), (Hello(7, "here", size=1), 8)],
    ids=["its rank", "its number", "both"],
)
def test_an_engine_that_starts_another_number_of_workers_is_named_at_once(hello: Hello, size: int) -> None:
    closed: list[str] = []
    channel = SimpleNamespace(close=lambda: closed.append("channel"))
    listener: Any = SimpleNamespace(connected=lambda: [(channel, hello)])
    workers = {"a": quiet_worker("a", 0)}
    supervisor = RunnerSupervisor(Work(["a"]), Engine("srun", [], listener=listener), workers, 1.0)
    try:
        cast("Any", supervisor)._on_connected()
    finally:
        supervisor.requests.close()
        cast("Any", supervisor)._selector.close()
    assert closed == ["channel"]
    assert [failure.description for failure in supervisor.failures] == [
        f"srun has started {size} processes, but the group has 1 workers: its options must not change the number of "
        "processes"
    ]
    assert workers["a"].channel is None


def test_a_second_runner_of_one_rank_is_named() -> None:
    connected = [(RecordedChannel(os.eventfd(0)), Hello(0, "here")) for _ in range(2)]
    workers = {"a": quiet_worker("a", 0)}
    listener: Any = SimpleNamespace(connected=lambda: connected)
    supervisor = RunnerSupervisor(Work(["a"]), Engine("srun", [], listener=listener), workers, 1.0)
    inside = cast("Any", supervisor)
    try:
        inside._on_connected()
        assert [failure.description for failure in supervisor.failures] == [
            "srun has started two processes as rank 0: its options must give each process of the group a rank of its "
            "own"
        ]
        assert workers["a"].channel is connected[0][0]
    finally:
        inside._disconnect(workers["a"])
        supervisor.requests.close()
        inside._selector.close()


@pytest.fixture
def start() -> Callable[..., ssh.RunnerGroup]:
    """Return a function that starts a group on hosts a and b, where a program stands in for the runner on b."""

    def begin(fn: Callable[..., Any], args: Any, program: str) -> ssh.RunnerGroup:
        shell = 'if [ "$1" = b ]; then exec "$PYTHON" -c "$PROGRAM"; else eval "$2"; fi'
        command = ("env", f"PYTHON={sys.executable}", f"PROGRAM={program}", "sh", "-c", shell, "ssh")
        return ssh.start(fn, None, args, hosts="a:1,b:1", init=False, ssh=command)

    return begin


def test_a_launcher_can_be_stopped_while_a_runner_takes_nothing(start: Callable[..., ssh.RunnerGroup]) -> None:
    hello = MARK + pack(Hello(1, "there"))
    program = f"import os, signal\nos.write(1, {hello!r})\nsignal.pause()"
    with start(len, (b"x" * 10_000_000,), program) as group:
        worker = group.processes["worker1"]
        while not (worker.channel is not None and worker.channel.unsent):
            os.sched_yield()
        group.supervisor.requests.stop()
        group.supervisor.requests.stop()
        group.wait(20)
        assert group.supervisor.failures == []
        assert worker.ended


@pytest.mark.parametrize(
    ("sent", "named"),
    [(bytes([255]) * 8, r"a frame of 1844674407370955"), (pack(Output(4, b"x")), r"Expected `int` <= 3.*stream")],
    ids=["a length", "a stream"],
)
def test_a_runner_that_sends_garbage_is_named(start: Callable[..., ssh.RunnerGroup], sent: bytes, named: str) -> None:
    program = f"import os, signal\nos.write(1, {MARK + sent!r})\nsignal.pause()"
    with start(os.getpid, (), program) as group:
        with pytest.raises(WorkerFailed, match=rf"worker worker1 was given up: .*{named}"):
            group.join(60)


def test_a_runner_that_does_not_answer_is_given_up(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(runner_supervisor, "_LAST_WORDS", -0.9)
    with ExitStack() as stack, subprocess.Popen([sys.executable, "-c", "pass"]) as engine:
        ends = [os.pipe(), os.pipe()]
        stack.callback(os.close, ends[0][1])
        stack.callback(os.close, ends[1][0])
        os.write(ends[0][1], pack(Hello(0, "frozen boot 1")) + pack(StoreHosted(1)))
        channel = PipeChannel(ends[0][0], ends[1][1])
        workers = {"a": quiet_worker("a", 0)}
        work = Work(["a"], work=b"x", grace=0.0)
        supervisor = RunnerSupervisor(work, Engine("torchrun", [engine], {0: channel}), workers, 60.0)
        supervisor.requests.stop()
        supervisor.run()
    assert "worker a may still run: its runner on frozen does not answer" in caplog.text
    assert workers["a"].channel is None


class RecordedChannel:
    """Keeps what is posted. Nothing arrives."""

    unsent = False

    def __init__(self, descriptor: int) -> None:
        self.posted: list[object] = []
        self._descriptor = descriptor

    def fileno(self) -> int:
        return self._descriptor

    def post(self, messages: Iterable[object]) -> None:
        self.posted += messages

    def close(self) -> None:
        os.close(self._descriptor)


def test_a_worker_that_is_killed_before_its_runner_is_connected_does_not_run() -> None:
    connected: list[tuple[RecordedChannel, Hello]] = []
    workers = {name: quiet_worker(name, rank) for rank, name in enumerate("ab")}
    listener: Any = SimpleNamespace(connected=lambda: connected)
    supervisor = RunnerSupervisor(Work(["a", "b"], b"x"), Engine("srun", [], listener=listener), workers, 1.0)
    inside = cast("Any", supervisor)
    try:
        supervisor.request_kill("b")
        inside._on_request()
        connected += [(RecordedChannel(os.eventfd(0)), Hello(rank, "here")) for rank in range(2)]
        inside._on_connected()
        inside._take(workers["a"], StoreHosted(1))
        (first, _), (second, _) = connected
        assert [type(message) for message in first.posted] == [HostStore, WorkPart, Start]
        assert [type(message) for message in second.posted] == [WorkPart, Start, Signal]
    finally:
        for worker in workers.values():
            inside._disconnect(worker)
        supervisor.requests.close()
        inside._selector.close()
