"""A process that ends: the program's exit functions find a working agent, and the others hear which error ended it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.paths import SOURCES
from telegrad import launch, rpc
from telegrad.agent.agent import Agent
from telegrad.calls.exit_cause import cause_of, shortened
from telegrad.errors import WorkerLost
from telegrad.testing.group import local_group

LATE = 110

# Worker 1 calls worker 0 until that one is exiting, and once more: each call but the first ones is served at exit.
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
    return subprocess.run(
        [sys.executable, "-m", "telegrad.cli", "run", *options, "--no-prefix", "-n", "2", str(script)],
        env={**os.environ, "PYTHONPATH": SOURCES},
        capture_output=True,
        text=True,
        timeout=LATE,
        check=False,
    )


@pytest.mark.parametrize("when", ["before the import", "before init_rpc", "after init_rpc"])
def test_a_shutdown_that_was_registered_with_atexit_finds_a_working_agent(when: str, tmp_path: Path) -> None:
    done = run_two(SHUTS_DOWN_AT_EXIT.format(when=when, **OWN), tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(done.stdout.splitlines()) == ["answered 1", "left", "left"]


@pytest.mark.parametrize("when", ["after init_rpc"])
def test_the_drop_ins_shutdown_that_was_registered_with_atexit_waits_for_the_others(when: str, tmp_path: Path) -> None:
    done = run_two(SHUTS_DOWN_AT_EXIT.format(when=when, **DROP_IN), tmp_path, "--drop-in")
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(done.stdout.splitlines()) == ["answered 1", "left", "left"]


# -- the first cause ----------------------------------------------------------------------------------------------

# Each worker but 0, which raises, prints what it gets to hear. Worker 2 never had a connection with worker 0.
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
        with open(f"{folder}/heard{rank}", "w") as file:
            file.write(str(error))
        raise

if __name__ == "__main__":
    context = mp.spawn(run, (sys.argv[1],), nprocs=3, join=False)
    for process in context.processes:
        process.join()
"""


def test_what_bystanders_raise_names_the_error_that_ended_the_first(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(ONE_RAISES)
    subprocess.run(
        [sys.executable, str(script), str(tmp_path)],
        env={**os.environ, "PYTHONPATH": SOURCES},
        capture_output=True,
        timeout=LATE,
        check=False,
    )
    for rank in (1, 2):
        heard = (tmp_path / f"heard{rank}").read_text()
        assert "ended with ValueError: the real error (program.py:11)" in heard, heard


def raises_or_calls() -> None:
    if os.environ["RANK"] == "0":
        raise KeyError("only here")
    while True:
        rpc.rpc_sync("worker0", abs, (-1,))


def test_a_forked_worker_that_raises_is_the_one_that_is_named() -> None:
    with pytest.raises(launch.WorkerFailed, match="worker worker0 raised KeyError: 'only here'"):
        launch.local(raises_or_calls, workers=2, timeout=LATE)


def call_until_it_fails(agent: Agent, to: str) -> None:
    while True:
        agent.call(to, abs, (-1,))


def test_a_worker_that_closes_while_an_error_is_handled_tells_the_others_which() -> None:
    with local_group(["a", "b", "c"]) as group:
        group["b"].call("a", abs, (-1,))
        try:
            raise ValueError("the real error")
        except ValueError:
            group["a"].close()
        for name in ("b", "c"):  # c had no connection with a
            with pytest.raises(WorkerLost, match=r"it ended with ValueError: the real error \(test_exiting.py:\d+\)"):
                call_until_it_fails(group[name], "a")


def test_an_end_that_follows_from_another_names_that_one() -> None:
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


def test_an_orderly_end_names_no_error() -> None:
    with local_group() as group:
        group["b"].call("a", abs, (-1,))
        group["a"].close()
        with pytest.raises(WorkerLost, match="it has shut down"):
            call_until_it_fails(group["b"], "a")


def test_a_cause_is_one_short_line() -> None:
    told = cause_of(ValueError("first\nsecond" + "x" * 5000))
    assert told == "with ValueError: first"
    assert len(cause_of(ValueError("x" * 5000))) < 700
    assert shortened("a\x1b[31m\u2028b") == "a?[31m?b"
