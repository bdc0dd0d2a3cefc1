"""`telegrad.launch.local` and `start`, on real processes that fork from the server."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.processes import LivenessPipe, ResourceSnapshot, wait_until

from telegrad.errors import PayloadError, TelegradError, UnknownWorker
from telegrad.launch import GroupTimeout, WorkerFailed, local, start
from telegrad.launch.local import LocalGroup


class Custom(Exception):
    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def rank() -> int:
    return int(os.environ["RANK"])


def wait_forever(path: str | None = None) -> None:
    """Hold the pipe at `path` open, together with a child process."""
    if path is not None:
        text = f"import signal; f = open({path!r}, 'w'); print('up', file=f, flush=True); signal.pause()"
        subprocess.Popen([sys.executable, "-c", text])
        with open(path, "w") as holding:
            print(os.environ["TELEGRAD_RUNTIME_DIR"], file=holding, flush=True)
            signal.pause()
    signal.pause()


def raise_on_one() -> None:
    if rank() == 1:
        raise Custom(17)
    signal.pause()


def fail_with(kind: str) -> object:
    if kind == "exit":
        os._exit(5)
    if kind == "sys.exit":
        sys.exit("enough")
    if kind == "signal":
        os.kill(os.getpid(), signal.SIGSEGV)
    return threading.Lock()


def test_results_are_in_the_order_of_the_workers() -> None:
    names = ["ps", "b", "a"]
    got = local(lambda x: (os.environ["TELEGRAD_NAME"], rank(), x), names, (torch.ones(2),), init=False)
    assert [result[:2] for result in got] == [("ps", 0), ("b", 1), ("a", 2)]
    assert all(result[2].equal(torch.ones(2)) for result in got)


def test_results_may_be_large() -> None:
    assert [len(got) for got in local(lambda: b"x" * 5_000_000, 2, init=False)] == [5_000_000] * 2


def test_a_function_of_a_module_is_sent_by_name() -> None:
    assert local(rank, 2, init=False) == [0, 1]


def test_output_is_prefixed_with_the_names_of_the_workers(capfd: pytest.CaptureFixture[str]) -> None:
    def talk() -> None:
        print("line")
        os.write(1, b"raw\n")  # Comes second only if Python does not buffer the first line.
        print("no end", end="")
        print("err", file=sys.stderr)

    local(talk, ["a", "bee"], init=False)
    out, err = capfd.readouterr()
    for prefix in ("a   | ", "bee | "):
        lines = [line.removeprefix(prefix) for line in out.splitlines() if line.startswith(prefix)]
        assert lines == ["line", "raw", "no end"]
    assert sorted(err.splitlines()) == ["a   | err", "bee | err"]


def test_without_prefix_workers_write_to_the_output_of_this_process(capfd: pytest.CaptureFixture[str]) -> None:
    local(lambda: print("plain"), 2, prefix=False, init=False)
    assert capfd.readouterr().out == "plain\nplain\n"


def test_workers_have_their_environment_and_this_process_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    local(rank, 1, init=False)
    monkeypatch.setenv("SET_AFTER_THE_SERVER_STARTED", "yes")
    before = dict(os.environ)
    (first, threads), _ = local(lambda: (dict(os.environ), torch.get_num_threads()), ["a", "b"], init=False)
    assert dict(os.environ) == before
    expected = {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TELEGRAD_NAME": "a",
        "OMP_NUM_THREADS": "1",
        "SET_AFTER_THE_SERVER_STARTED": "yes",
    }
    assert {key: first[key] for key in expected} == expected
    assert threads == 1
    assert not os.path.exists(first["TELEGRAD_RUNTIME_DIR"])


def test_torch_finds_the_store_of_the_launcher() -> None:
    def meet() -> bytes:
        store, me, _ = next(torch.distributed.rendezvous("env://"))
        store.set(f"key{me}", f"from {me}")
        return bytes(store.get(f"key{1 - me}"))

    assert local(meet, 2, init=False) == [b"from 1", b"from 0"]


def test_workers_do_not_draw_the_same_random_numbers() -> None:
    numpy = pytest.importorskip("numpy")
    assert len(set(local(lambda: numpy.random.rand(), 3, init=False))) == 3


def test_init_rpc_runs_before_and_shutdown_after_the_function() -> None:
    class Patch:
        """Replaces init_rpc and shutdown in the worker when it is unpickled there."""

        def __reduce__(self) -> tuple[Any, ...]:
            return patch, ()

    def patch() -> list[Any]:
        import telegrad.rpc

        log: list[Any] = []
        telegrad.rpc.init_rpc = lambda *args, **options: log.append((args, options))  # type: ignore[attr-defined, assignment]  # a fake
        telegrad.rpc.shutdown = lambda: log.append("shutdown")  # type: ignore[attr-defined, assignment]  # a fake
        return log

    def work(log: list[Any]) -> list[Any]:
        log.append("work")
        return log

    (log,) = local(work, ["a"], (Patch(),), init_options={"timeout": 3})
    assert log == [(("a",), {"timeout": 3}), "work", "shutdown"]


def test_workers_can_call_each_other() -> None:
    def call() -> int:
        import telegrad.rpc

        other = {"a": "b", "b": "a"}[os.environ["TELEGRAD_NAME"]]
        return int(telegrad.rpc.rpc_sync(other, rank))

    assert local(call, ["a", "b"], timeout=60) == [1, 0]


def test_an_exception_stops_all_workers_and_is_the_cause() -> None:
    with pytest.raises(WorkerFailed, match=r"worker worker1 raised tests\.launch\.test_local\.Custom: 17") as caught:
        local(raise_on_one, 3, init=False)
    assert isinstance(caught.value.__cause__, Custom)
    assert caught.value.__cause__.number == 17
    assert caught.value.worker == "worker1"
    assert "in raise_on_one" in caught.value.remote_traceback
    assert caught.value.remote_traceback in str(caught.value)
    assert "forked.py" not in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        ("exit", "worker a exited with code 5 before its function returned"),
        ("sys.exit", "worker a raised SystemExit: enough"),
        ("signal", "worker a was killed by SIGSEGV before"),
        ("value", "worker a raised .*PayloadError: what the function returned, a lock, cannot be pickled"),
    ],
)
def test_every_kind_of_failure_is_reported(kind: str, sentence: str) -> None:
    with pytest.raises(WorkerFailed, match=sentence):
        local(fail_with, ["a"], (kind,), init=False)


@pytest.mark.parametrize("code", [(), (0,), (None,)])
@pytest.mark.parametrize("init", [False, True])
def test_a_function_that_exits_with_code_0_has_finished(code: tuple[Any, ...], init: bool) -> None:
    def leave() -> int:
        if os.environ["TELEGRAD_NAME"] == "a":
            sys.exit(*code)
        return 1

    assert local(leave, ["a", "b"], init=init) == [None, 1]


def test_arguments_that_cannot_be_pickled_are_refused_before_the_start() -> None:
    with pytest.raises(PayloadError, match=r"cannot pickle the function or its arguments .*: args\[0\]: "):
        local(rank, 1, (threading.Lock(),), init=False)
    lock = threading.Lock()
    with pytest.raises(PayloadError, match="function's variable 'lock': cannot pickle"):
        local(lambda: lock, 1, init=False)


def test_a_timeout_stops_all_workers_and_names_the_unfinished_ones(liveness: LivenessPipe) -> None:
    with start(wait_forever, ["a", "b"], (str(liveness.path),), init=False) as group:
        liveness.wait_for_lines(4)
        with pytest.raises(GroupTimeout, match=r"^a, b did not finish within 0\.01 seconds") as caught:
            group.join(0.01)
    assert caught.value.unfinished == ["a", "b"]
    assert isinstance(caught.value, TimeoutError)
    liveness.wait_for_end()


def test_a_timeout_does_not_name_finished_workers() -> None:
    with start(lambda: signal.pause() if rank() == 1 else None, ["a", "b"], init=False) as group:
        wait_until(lambda: group.processes["a"].exitcode == 0)
        with pytest.raises(GroupTimeout, match=r"^b did not finish"):
            group.join(0.01)


def test_local_takes_a_timeout() -> None:
    with pytest.raises(GroupTimeout, match=r"did not finish within 0\.2 seconds; all workers were stopped"):
        local(wait_forever, 1, init=False, timeout=0.2)


def test_a_killed_worker_leaves_the_others_running(liveness: LivenessPipe) -> None:
    def work(path: str) -> str:
        if rank() == 1:
            wait_forever(path)
        with open(path + ".go") as go:
            return go.read()

    go = f"{liveness.path}.go"
    os.mkfifo(go)
    with start(work, ["a", "b"], (str(liveness.path),), init=False) as group:
        liveness.wait_for_lines(2)
        assert group.processes["b"].exitcode is None
        os.kill(group.processes["b"].pid, 0)
        group.kill("b")
        liveness.wait_for_end()
        Path(go).write_text("continued")
        assert group.join(20) == ["continued", None]
        assert group.processes["b"].exitcode == -signal.SIGKILL
        with pytest.raises(UnknownWorker, match="this group has no worker 'c'; its workers are a, b"):
            group.kill("c")


def test_a_worker_killed_from_outside_is_a_failure() -> None:
    with start(wait_forever, 2, init=False) as group:
        os.kill(group.processes["worker0"].pid, signal.SIGKILL)
        with pytest.raises(WorkerFailed, match="worker worker0 was killed by SIGKILL") as caught:
            group.join(20)
    assert caught.value.exitcode == -signal.SIGKILL


def test_stop_stops_all_workers_and_discards_results(liveness: LivenessPipe) -> None:
    group = start(wait_forever, ["a"], (str(liveness.path),), init=False)
    directory = next(line for line in liveness.wait_for_lines(2) if line != "up")
    group.stop()
    group.stop()
    liveness.wait_for_end()
    assert not os.path.exists(directory)
    with pytest.raises(TelegradError, match="was stopped before a finished"):
        group.join()


def test_a_group_can_be_stopped_before_its_workers_are_up() -> None:
    group = start(wait_forever, 3, init=False)
    group.stop()
    assert all(worker.exitcode == -signal.SIGTERM for worker in group.processes.values())


def test_ctrl_c_stops_all_workers(liveness: LivenessPipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waiting, join = tmp_path / "waiting", LocalGroup.join

    def touch_and_join(group: LocalGroup, timeout: float | None = None) -> Any:
        waiting.touch()
        return join(group, timeout)

    monkeypatch.setattr(LocalGroup, "join", touch_and_join)

    def interrupt(path: str, launcher: int, waiting: Path) -> None:
        while not waiting.exists():
            os.sched_yield()
        with open(path, "w"):
            text = "import signal; print('up', flush=True); signal.pause()"
            with subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE) as child:
                child.stdout.readline()  # type: ignore[union-attr]  # it is a pipe
                os.kill(launcher, signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            local(interrupt, 1, (str(liveness.path), os.getpid(), waiting), init=False)
    finally:
        signal.signal(signal.SIGINT, before)
    liveness.wait_for_end()


def test_no_threads_or_descriptors_are_leaked() -> None:
    local(rank, 1, init=False)  # The server keeps running, and two descriptors lead to it.
    before = ResourceSnapshot()
    local(rank, 3, init=False)
    with pytest.raises(WorkerFailed):
        local(raise_on_one, 3, init=False)
    before.wait_until_restored()


def test_many_workers_start_within_seconds() -> None:
    local(rank, 1, init=False)
    began = time.monotonic()
    assert local(lambda: int(os.environ["RANK"]), 64, prefix=False, init=False) == list(range(64))
    assert time.monotonic() - began < 20  # 0.4 s on an idle machine; loading torch 64 times takes over a minute.


def test_a_script_needs_no_guard_and_can_send_its_own_classes(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        """
import telegrad.launch
print("main runs")
class Result:
    def __init__(self, value): self.value = value
class Problem(Exception): pass
def work(x): return Result(double(x))
def double(x): return 2 * x
def fail(): raise Problem("p")
results = telegrad.launch.local(work, 2, (21,), init=False)
print([isinstance(r, Result) and r.value for r in results])
try:
    telegrad.launch.local(fail, 1, init=False)
except telegrad.launch.WorkerFailed as error:
    print(isinstance(error.__cause__, Problem))
"""
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.splitlines() == ["main runs", "[42, 42]", "True"], done.stderr


@pytest.mark.parametrize(("how", "code"), [("exit", 0), ("kill", -signal.SIGKILL)])
def test_groups_do_not_outlive_the_program_that_started_them(
    how: str, code: int, tmp_path: Path, liveness: LivenessPipe
) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        f"""
import os, signal, sys, telegrad.launch
def wait(path):
    holding = open(path, "w")
    print(os.environ["TELEGRAD_RUNTIME_DIR"], file=holding, flush=True)
    signal.pause()
group = telegrad.launch.start(wait, 1, ({str(liveness.path)!r},), init=False)
sys.stdin.read()
if sys.argv[1] == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
"""
    )
    with subprocess.Popen([sys.executable, script, how], stdin=subprocess.PIPE) as program:
        (directory,) = liveness.wait_for_lines(1)
        program.communicate(timeout=20)
    assert program.returncode == code
    liveness.wait_for_end()
    if how == "kill":
        shutil.rmtree(directory)  # No process was left to remove it.
    assert not os.path.exists(directory)
