"""The rules of the supervisor, on real processes of `telegrad run`."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.launch.conftest import NAMES, SLEEP, Write, start_grandchild
from tests.support.processes import LivenessPipe

from telegrad.launch.run import run


def test_a_failure_stops_all_workers_and_sets_the_exit_code(
    write: Write, liveness: LivenessPipe, capfd: pytest.CaptureFixture[str]
) -> None:
    # Worker 1 fails only after worker 0 has opened this pipe, so that worker 0 is running.
    ready = f"{liveness.path}.ready"
    os.mkfifo(ready)
    command = write(
        start_grandchild(liveness)
        + f"""
if rank == 1:
    with open({ready!r}) as pipe:
        pipe.read()
    print("last words", file=sys.stderr)
    sys.exit(3)
open({ready!r}, "w").close()
signal.pause()
"""
    )
    assert run(command, NAMES) == 3
    liveness.wait_for_end()
    err = capfd.readouterr().err.splitlines()
    assert "worker1 | last words" in err
    assert err[-1] == "telegrad run: worker1 failed with exit code 3; 1 running worker stopped"


def test_a_worker_that_ignores_sigterm_is_killed_after_the_grace_period(write: Write, tmp_path: Path) -> None:
    ignoring = tmp_path / "ignoring"
    os.mkfifo(ignoring)
    command = write(
        f"""
if rank == 0:
    open({str(ignoring)!r}).read()
    sys.exit(4)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
open({str(ignoring)!r}, "w").close()
while True:
    signal.pause()
"""
    )
    assert run(command, NAMES, grace=0.1) == 4


def test_a_worker_that_succeeds_leaves_no_grandchild(write: Write, liveness: LivenessPipe) -> None:
    ready = f"{liveness.path}.ready"
    os.mkfifo(ready)
    grandchild = f"import signal; f = open({str(liveness.path)!r}, 'w'); open({ready!r}, 'w').close(); signal.pause()"
    command = write(f"subprocess.Popen([sys.executable, '-c', {grandchild!r}]); open({ready!r}).read()")
    assert run(command, ["a"]) == 0
    liveness.wait_for_end()


def test_a_second_signal_kills_immediately(
    write: Write, liveness: LivenessPipe, launch: Callable[..., subprocess.Popen[str]]
) -> None:
    command = write(
        f"""
liveness = open({str(liveness.path)!r}, "w")
# Not print: the signal may arrive during the other print, and files are not reentrant.
signal.signal(signal.SIGINT, lambda *_: os.write(liveness.fileno(), b"ignored\\n"))
print("up", file=liveness, flush=True)
"""
        + SLEEP
    )
    launcher = launch("-n", "1", "--grace", "3600", *command)
    assert liveness.wait_for_lines(1) == ["up"]
    launcher.send_signal(signal.SIGINT)
    assert liveness.wait_for_lines(1) == ["ignored"]
    launcher.send_signal(signal.SIGINT)
    assert launcher.wait(timeout=60) == 130
    liveness.wait_for_end()


def test_no_process_outlives_a_killed_launcher(
    write: Write, liveness: LivenessPipe, launch: Callable[..., subprocess.Popen[str]]
) -> None:
    launcher = launch("-n", "2", *write(start_grandchild(liveness) + "signal.pause()"))
    directory = next(line for line in liveness.wait_for_lines(4) if line != "up")
    launcher.kill()
    launcher.wait(timeout=60)
    liveness.wait_for_end()
    shutil.rmtree(directory)  # No process is left to remove it.
