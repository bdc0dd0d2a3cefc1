"""`telegrad.launch.local` and `start`, on real processes that fork from the server."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from support.witnesses import Belongings, Witness, wait_until
from telegrad.errors import PayloadError, TelegradError, UnknownWorker
from telegrad.launch import GroupTimeout, WorkerFailed, local, start
from telegrad.launch.local import Group


class Custom(Exception):
    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def rank() -> int:
    return int(os.environ["RANK"])


def wait_for_ever(path: str | None = None) -> None:
    """Hold the witness at `path` open, with a child process that does so, too."""
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


def test_results_come_in_the_order_of_the_workers() -> None:
    names = ["ps", "b", "a"]
    got = local(lambda x: (os.environ["TELEGRAD_NAME"], rank(), x), names, (torch.ones(2),), init=False)
    assert [result[:2] for result in got] == [("ps", 0), ("b", 1), ("a", 2)]
    assert all(result[2].equal(torch.ones(2)) for result in got)


def test_large_results_pass() -> None:
    assert [len(got) for got in local(lambda: b"x" * 5_000_000, 2, init=False)] == [5_000_000] * 2


def test_a_function_of_a_module_goes_by_name() -> None:
    assert local(rank, 2, init=False) == [0, 1]


def test_what_workers_print_has_their_names(capfd: pytest.CaptureFixture[str]) -> None:
    def talk() -> None:
        print("line")
        os.write(1, b"raw\n")  # Comes second, only if Python does not hold back what was printed first.
        print("no end", end="")
        print("err", file=sys.stderr)

    local(talk, ["a", "bee"], init=False)
    out, err = capfd.readouterr()
    for prefix in ("a   | ", "bee | "):
        lines = [line.removeprefix(prefix) for line in out.splitlines() if line.startswith(prefix)]
        assert lines == ["line", "raw", "no end"]
    assert sorted(err.splitlines()) == ["a   | err", "bee | err"]


def test_without_prefix_workers_write_where_this_process_writes(capfd: pytest.CaptureFixture[str]) -> None:
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


def test_rpc_is_begun_before_and_ended_after_the_function() -> None:
    class Rehearsal:
        """Puts stand-ins for init_rpc and shutdown into the worker, when it is unpickled there."""

        def __reduce__(self) -> tuple[Any, ...]:
            return rehearse, ()

    def rehearse() -> list[Any]:
        import telegrad.rpc

        log: list[Any] = []
        telegrad.rpc.init_rpc = lambda *args, **options: log.append((args, options))  # type: ignore[attr-defined, assignment]  # a stand-in
        telegrad.rpc.shutdown = lambda: log.append("shutdown")  # type: ignore[attr-defined, assignment]  # a stand-in
        return log

    def work(log: list[Any]) -> list[Any]:
        log.append("work")
        return log

    (log,) = local(work, ["a"], (Rehearsal(),), init_options={"timeout": 3})
    assert log == [(("a",), {"timeout": 3}), "work", "shutdown"]


def test_workers_can_call_each_other() -> None:
    def call() -> int:
        import telegrad.rpc

        other = {"a": "b", "b": "a"}[os.environ["TELEGRAD_NAME"]]
        return int(telegrad.rpc.rpc_sync(other, rank))

    assert local(call, ["a", "b"], timeout=60) == [1, 0]


def test_an_exception_stops_all_and_is_the_cause() -> None:
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
        ("exit", "worker a ended with exit code 5 before its function returned"),
        ("sys.exit", "worker a raised SystemExit: enough"),
        ("signal", "worker a was killed by SIGSEGV before"),
        ("value", "worker a raised TypeError: cannot pickle"),
    ],
)
def test_every_way_to_fail_is_told(kind: str, sentence: str) -> None:
    with pytest.raises(WorkerFailed, match=sentence):
        local(fail_with, ["a"], (kind,), init=False)


def test_what_cannot_be_sent_is_refused_before_anything_starts() -> None:
    with pytest.raises(PayloadError, match="cannot be sent to the workers"):
        local(rank, 1, (threading.Lock(),), init=False)


def test_a_timeout_stops_all_and_names_who_had_not_ended(witness: Witness) -> None:
    with start(wait_for_ever, ["a", "b"], (str(witness.path),), init=False) as group:
        witness.wait_for_lines(4)
        with pytest.raises(GroupTimeout, match=r"^a, b had not ended after 0\.01 seconds") as caught:
            group.join(0.01)
    assert caught.value.unfinished == ["a", "b"]
    assert isinstance(caught.value, TimeoutError)
    witness.wait_for_end()


def test_a_timeout_leaves_out_who_has_ended() -> None:
    with start(lambda: signal.pause() if rank() == 1 else None, ["a", "b"], init=False) as group:
        wait_until(lambda: group.processes["a"].exitcode == 0)
        with pytest.raises(GroupTimeout, match=r"^b had not ended"):
            group.join(0.01)


def test_local_takes_a_timeout() -> None:
    with pytest.raises(GroupTimeout, match=r"had not ended after 0\.2 seconds; all workers were stopped"):
        local(wait_for_ever, 1, init=False, timeout=0.2)


def test_a_killed_worker_leaves_the_others_running(witness: Witness) -> None:
    def work(path: str) -> str:
        if rank() == 1:
            wait_for_ever(path)
        with open(path + ".go") as go:
            return go.read()

    go = f"{witness.path}.go"
    os.mkfifo(go)
    with start(work, ["a", "b"], (str(witness.path),), init=False) as group:
        witness.wait_for_lines(2)
        assert group.processes["b"].exitcode is None
        os.kill(group.processes["b"].pid, 0)
        group.kill("b")
        witness.wait_for_end()
        Path(go).write_text("went on")
        assert group.join(20) == ["went on", None]
        assert group.processes["b"].exitcode == -signal.SIGKILL
        with pytest.raises(UnknownWorker, match="no worker 'c' in this group, only a, b"):
            group.kill("c")


def test_a_worker_killed_by_somebody_else_is_a_failure() -> None:
    with start(wait_for_ever, 2, init=False) as group:
        os.kill(group.processes["worker0"].pid, signal.SIGKILL)
        with pytest.raises(WorkerFailed, match="worker worker0 was killed by SIGKILL") as caught:
            group.join(20)
    assert caught.value.exitcode == -signal.SIGKILL


def test_stop_ends_everything_and_then_there_are_no_results(witness: Witness) -> None:
    group = start(wait_for_ever, ["a"], (str(witness.path),), init=False)
    directory = next(line for line in witness.wait_for_lines(2) if line != "up")
    group.stop()
    group.stop()
    witness.wait_for_end()
    assert not os.path.exists(directory)
    with pytest.raises(TelegradError, match="was stopped before a had ended"):
        group.join()


def test_a_group_can_be_stopped_before_its_workers_have_come_up() -> None:
    group = start(wait_for_ever, 3, init=False)
    group.stop()
    assert all(worker.exitcode == -signal.SIGTERM for worker in group.processes.values())


def test_ctrl_c_stops_all(witness: Witness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    note, join = tmp_path / "it waits", Group.join

    def note_and_join(group: Group, timeout: float | None = None) -> Any:
        note.touch()
        return join(group, timeout)

    monkeypatch.setattr(Group, "join", note_and_join)

    def interrupt(path: str, launcher: int, note: Path) -> None:
        while not note.exists():
            os.sched_yield()
        with open(path, "w"):
            text = "import signal; print('up', flush=True); signal.pause()"
            with subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE) as child:
                child.stdout.readline()  # type: ignore[union-attr]  # it is a pipe
                os.kill(launcher, signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            local(interrupt, 1, (str(witness.path), os.getpid(), note), init=False)
    finally:
        signal.signal(signal.SIGINT, before)
    witness.wait_for_end()


def test_nothing_is_left_in_this_process() -> None:
    local(rank, 1, init=False)  # The server stays, and with it the two descriptors that lead to it.
    before = Belongings()
    local(rank, 3, init=False)
    with pytest.raises(WorkerFailed):
        local(raise_on_one, 3, init=False)
    before.wait_until_as_before()


def test_many_workers_start_within_seconds() -> None:
    local(rank, 1, init=False)
    began = time.monotonic()
    assert local(lambda: int(os.environ["RANK"]), 64, prefix=False, init=False) == list(range(64))
    assert time.monotonic() - began < 20  # 0.4 s on an idle machine; loading torch 64 times takes over a minute.


def test_a_script_needs_no_guard_and_may_define_what_it_sends(tmp_path: Path) -> None:
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
def test_a_program_takes_its_groups_with_it_however_it_ends(
    how: str, code: int, tmp_path: Path, witness: Witness
) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        f"""
import os, signal, sys, telegrad.launch
def wait(path):
    holding = open(path, "w")
    print(os.environ["TELEGRAD_RUNTIME_DIR"], file=holding, flush=True)
    signal.pause()
group = telegrad.launch.start(wait, 1, ({str(witness.path)!r},), init=False)
sys.stdin.read()
if sys.argv[1] == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
"""
    )
    with subprocess.Popen([sys.executable, script, how], stdin=subprocess.PIPE) as program:
        (directory,) = witness.wait_for_lines(1)
        program.communicate(timeout=20)
    assert program.returncode == code
    witness.wait_for_end()
    if how == "kill":
        os.rmdir(directory)  # Nobody was left who could have removed it.
    assert not os.path.exists(directory)
