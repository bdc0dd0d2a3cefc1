"""Interpreter exit: exit handlers find a working agent, and other workers learn which error ended the process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.drop_in_programs import printed_lines
from tests.support.loaded_interpreter import run_loaded
from tests.support.paths import SOURCES
from tests.support.processes import unexpected_errors

from telegrad import launch, rpc
from telegrad.agent.agent import Agent
from telegrad.calls.exit_cause import cause_of
from telegrad.connection.goodbye import shortened
from telegrad.errors import WorkerLost
from telegrad.testing.group import local_group

TIMEOUT = 110

# Worker 1 calls worker 0 until that one is exiting, and once more. The last calls are served during exit.
SHUTS_DOWN_AT_EXIT = """
import atexit, os, sys
exiting = []

def leave():
    exiting.append(True)
    {shutdown}
    print("left", flush=True)

def is_exiting():
    return {nested} + bool(exiting)

if {when!r} == "before the import":
    atexit.register(leave)
import telegrad
{imports}
if {when!r} == "before init_rpc":
    atexit.register(leave)
rank = int(os.environ["RANK"])
{init}
if {when!r} == "after init_rpc":
    atexit.register(leave)
if rank == 1:
    while not rpc.rpc_sync("worker0", is_exiting):
        pass
    print("answered", rpc.rpc_sync("worker0", abs, (-1,)), flush=True)
"""
OWN = {
    "imports": "from telegrad import rpc",
    "init": "rpc.init_rpc()",
    "shutdown": "telegrad.shutdown()",
    "nested": "0 * rpc.rpc_sync('worker1', abs, (-1,))",
}
DROP_IN = {
    "imports": "import torch.distributed.rpc as rpc",
    "init": "rpc.init_rpc(f'worker{rank}', rank=rank, world_size=2)",
    "shutdown": "import torch.distributed.rpc as rpc; rpc.shutdown(graceful=True)",
    "nested": "0",
}


def run_two(program: str, folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    script = folder / "program.py"
    script.write_text(program)
    return run_loaded(
        [sys.executable, "-m", "telegrad.cli", "run", *options, "-n", "2", str(script)],
        env={**os.environ, "PYTHONPATH": SOURCES},
        timeout=TIMEOUT,
    )


@pytest.mark.parametrize("when", ["before the import", "before init_rpc", "after init_rpc"])
def test_a_shutdown_registered_with_atexit_finds_a_working_agent(when: str, tmp_path: Path) -> None:
    done = run_two(SHUTS_DOWN_AT_EXIT.format(when=when, **OWN), tmp_path)
    assert (done.returncode, unexpected_errors(done.stderr)) == (0, "")
    assert printed_lines(done.stdout) == ["answered 1", "left", "left"]


@pytest.mark.parametrize("when", ["after init_rpc"])
def test_a_drop_in_shutdown_registered_with_atexit_waits_for_the_others(when: str, tmp_path: Path) -> None:
    done = run_two(SHUTS_DOWN_AT_EXIT.format(when=when, **DROP_IN), tmp_path, "--drop-in")
    assert (done.returncode, unexpected_errors(done.stderr)) == (0, "")
    assert printed_lines(done.stdout) == ["answered 1", "left", "left"]


FORGETS = """
import telegrad
telegrad.init_rpc()
telegrad.barrier()
if telegrad.get_worker_info().id == 0:
    telegrad.shutdown(graceful=False)
"""


def test_a_program_that_ends_without_shutdown_says_so(tmp_path: Path) -> None:
    done = run_two(FORGETS, tmp_path, "--no-prefix")
    assert done.returncode == 0
    said = [line for line in done.stderr.splitlines() if "shutdown()" in line]
    assert len(said) == 1
    assert said[0].startswith("worker 'worker1' ends without telegrad.shutdown()")


# -- the first cause ----------------------------------------------------------------------------------------------

# Worker 0 raises. The others write their errors to files. Worker 2 never had a connection with worker 0.
ONE_RAISES = """
import sys
import torch.multiprocessing as mp

def run(rank, folder):
    import telegrad
    from telegrad.errors import WorkerLost
    telegrad.init_rpc(f"w{rank}", rank=rank, world_size=3,
                      rpc_backend_options=telegrad.Options(init_method=f"file://{folder}/store"))
    if rank == 0:
        raise ValueError("the real error")
    try:
        while True:
            telegrad.rpc_sync("w0" if rank == 1 else "w1", abs, (-1,))
    except WorkerLost as error:
        with open(f"{folder}/error{rank}", "w") as file:
            file.write(str(error))
        raise

if __name__ == "__main__":
    context = mp.spawn(run, (sys.argv[1],), nprocs=3, join=False)
    for process in context.processes:
        process.join()
"""


def test_errors_of_other_workers_name_the_error_that_ended_the_first(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(ONE_RAISES)
    run_loaded(
        [sys.executable, str(script), str(tmp_path)],
        env={**os.environ, "PYTHONPATH": SOURCES},
        timeout=TIMEOUT,
    )
    for rank in (1, 2):
        error = (tmp_path / f"error{rank}").read_text()
        assert "ended with ValueError: the real error (program.py:11)" in error, error


def raises_or_calls() -> None:
    if os.environ["RANK"] == "0":
        raise KeyError("only here")
    while True:
        rpc.rpc_sync("worker0", abs, (-1,))


def test_a_forked_worker_that_raises_is_named() -> None:
    with pytest.raises(launch.WorkerFailed, match="worker worker0 raised KeyError: 'only here'"):
        launch.local(raises_or_calls, workers=2, timeout=TIMEOUT)


def call_until_it_fails(agent: Agent, to: str) -> None:
    while True:
        agent.call(to, abs, (-1,))


def test_a_worker_that_closes_while_handling_an_error_reports_it_to_the_others() -> None:
    with local_group(["a", "b", "c"]) as group:
        group["b"].call("a", abs, (-1,))
        try:
            raise ValueError("the real error")
        except ValueError:
            group["a"].close()
        for name in ("b", "c"):  # c had no connection with a
            with pytest.raises(
                WorkerLost, match=r"it ended with ValueError: the real error \(test_interpreter_exit.py:\d+\)"
            ):
                call_until_it_fails(group[name], "a")


def test_a_consequential_failure_names_the_first_cause() -> None:
    with local_group(["a", "b", "c"]) as group:
        try:
            raise ValueError("the real error")
        except ValueError:
            group["a"].close()
        try:
            call_until_it_fails(group["b"], "a")
        except WorkerLost:
            group["b"].close()
        with pytest.raises(WorkerLost, match=r"it ended because worker 'a' ended with ValueError: the real error"):
            call_until_it_fails(group["c"], "b")


def test_a_regular_shutdown_names_no_error() -> None:
    with local_group() as group:
        group["b"].call("a", abs, (-1,))
        group["a"].close()
        with pytest.raises(WorkerLost, match="it has shut down"):
            call_until_it_fails(group["b"], "a")


def test_a_cause_is_one_short_line() -> None:
    cause = cause_of(ValueError("first\nsecond" + "x" * 5000))
    assert cause == "with ValueError: first"
    assert len(cause_of(ValueError("x" * 5000))) < 700
    assert shortened("a\x1b[31m\u2028b") == "a?[31m?b"
