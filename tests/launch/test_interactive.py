"""`telegrad.launch.workers`: this process joins a group with workers that are started for it."""

from __future__ import annotations

import signal
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.support.loaded_interpreter import LoadedPython, run_loaded

import telegrad
from telegrad.launch import WorkerFailed, interactive
from telegrad.launch.interactive import WorkersHere, workers

SESSION = """\
import telegrad, torch
factor = 3
class Counter:
    def __init__(self):
        self.count = 0
    def add(self, n):
        self.count += n
        return self
class Wrong(Exception):
    pass
def scaled(x):
    return x * factor
def fail():
    raise Wrong("on purpose")

group = telegrad.launch.workers(2)
x = torch.ones(2)
print(telegrad.rpc_sync("worker1", scaled, (x,)))
counter = telegrad.remote("worker0", Counter)
print(type(counter.rpc_sync().add(2)) is Counter, counter.rpc_sync().add(3).count)
try:
    telegrad.rpc_sync("worker0", fail)
except Wrong as error:
    print("raised", error)

del counter
"""
PRINTED = ["tensor([3., 3.])", "True 5", "raised on purpose"]


def test_calls_and_passes_from_the_process_that_started_the_workers() -> None:
    x = torch.ones(3, requires_grad=True)
    with workers(["a", "b"]) as group:
        assert telegrad.get_worker_info().name == "main"
        assert {one.name for one in telegrad.rpc.get_worker_infos()} == {"a", "b", "main"}
        with telegrad.autograd.context() as context_id:
            loss = telegrad.rpc_sync("b", torch.mul, (x, 2)).sum()
            telegrad.autograd.backward(context_id, [loss])
            assert telegrad.autograd.get_gradients(context_id)[x].tolist() == [2, 2, 2]
        with pytest.raises(telegrad.errors.TelegradError, match=r"already worker 'main'.*telegrad.shutdown\(\)"):
            workers(1)
        assert list(group.names) == ["a", "b"]
        assert repr(group) == "<this process, worker 'main', and its workers a, b>"
    assert telegrad.rpc.api.process_agent() is None


def test_an_error_in_the_block_ends_the_workers_and_is_the_only_thing_shown(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(ZeroDivisionError), workers(2):
        raise ZeroDivisionError
    assert capfd.readouterr() == ("", "")


def test_a_worker_that_dies_does_not_stop_the_others(capfd: pytest.CaptureFixture[str]) -> None:
    group = workers(2)
    with pytest.raises(telegrad.errors.WorkerLost):
        telegrad.rpc_sync("worker0", signal.raise_signal, (signal.SIGKILL,))
    assert telegrad.rpc_sync("worker1", len, ([1, 2],)) == 2
    with pytest.raises(WorkerFailed, match="worker worker0 was killed by SIGKILL"):
        group.join()
    assert "worker0 was killed by SIGKILL" in capfd.readouterr().err


def test_a_worker_that_was_killed_on_purpose_is_no_failure() -> None:
    with workers(2) as group:
        group.kill("worker0")
        with pytest.raises(telegrad.errors.WorkerLost):
            telegrad.rpc_sync("worker0", len, ([],))


def test_the_user_may_shut_down_first() -> None:
    with workers(1) as group:
        telegrad.shutdown()
        assert group.join(timeout=60) == [None]


def test_the_timeout_of_join_is_for_leaving_the_group_and_for_the_end_of_the_workers_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, waited = [100.0], dict[str, float | None]()

    class Ending:
        """A group whose workers end at once."""

        def join(self, timeout: float | None) -> list[object]:
            waited["join"] = timeout
            return []

    def shutdown(timeout: float) -> None:
        waited["shutdown"] = timeout
        clock[0] += 4.0

    monkeypatch.setattr(interactive, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(interactive.rpc, "shutdown", shutdown)
    for timeout, left in ((10.0, 6.0), (3.0, 0.0), (None, None)):
        WorkersHere(Ending(), "main").join(timeout)  # type: ignore[arg-type]
        assert waited == {"shutdown": timeout or 0.0, "join": left}


@pytest.mark.parametrize(
    ("names", "options", "sentence"),
    [
        (["a", "a"], {}, "'a' is given more than once"),
        (["main"], {}, "'main' is given more than once"),
        (1, {"name": "no name"}, "no name"),
    ],
)
def test_wrong_names_are_refused_before_anything_starts(names: Any, options: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        workers(names, **options)


def test_functions_of_a_script_are_sent_whole_and_its_end_stops_the_workers() -> None:
    done = run_loaded([sys.executable, "-c", SESSION], timeout=100)
    assert (done.stdout.splitlines(), done.returncode) == (PRINTED, 0), done.stderr


def test_functions_of_a_notebook_cell_are_sent_whole() -> None:
    cell = f"exec(compile({SESSION!r}, '<cell>', 'exec'), {{'__name__': '__main__'}})\n"
    done = run_loaded([sys.executable, "-c", f"{cell}import telegrad; telegrad.shutdown()"], timeout=100)
    assert (done.stdout.splitlines(), done.returncode) == (PRINTED, 0), done.stderr


def test_functions_typed_at_the_prompt_are_sent_whole() -> None:
    program = "import code; code.interact(banner='', exitmsg='')"
    typed = SESSION.replace("\nclass", "\n\nclass").replace("\ndef", "\n\ndef").replace("\ngroup", "\n\ngroup")
    with LoadedPython(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        out, _ = process.communicate(f"import sys; sys.ps1 = sys.ps2 = ''\n{typed}\n", timeout=100)
    assert [line.removeprefix(">>> ") for line in out.splitlines() if line] == PRINTED
    assert process.returncode == 0
