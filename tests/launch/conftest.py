from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.support.loaded_interpreter import LoadedPython
from tests.support.processes import LivenessPipe

Write = Callable[[str], list[str]]
Launch = Callable[[list[str]], subprocess.Popen[str]]
NAMES = ["worker0", "worker1"]

# Not pause: a signal may arrive between the interpreter's last check and the system call, which would then sleep.
SLEEP = "while True: signal.sigtimedwait((), 1)"


def start_grandchild(liveness: LivenessPipe) -> str:
    """Return a script that starts a child. Both hold the pipe open, and the worker writes its directory to it."""
    return f"""
subprocess.Popen([sys.executable, "-c",
    "import signal; f = open({str(liveness.path)!r}, 'w'); print('up', file=f, flush=True); signal.pause()"])
liveness = open({str(liveness.path)!r}, "w")
print(os.environ["TELEGRAD_RUNTIME_DIR"], file=liveness, flush=True)
"""


@pytest.fixture
def liveness(tmp_path: Path) -> Iterator[LivenessPipe]:
    pipe = LivenessPipe(tmp_path / "liveness")
    yield pipe
    pipe.close()


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Return a function that writes a script and returns the command that runs it."""

    def make(text: str) -> list[str]:
        script = tmp_path / "script.py"
        script.write_text("import os, signal, subprocess, sys\nrank = int(os.environ['RANK'])\n" + text)
        return [str(script)]

    return make


@pytest.fixture
def launch_command() -> Iterator[Launch]:
    """Return a function that starts Python, which has loaded torch, with these arguments as a separate process."""
    started: list[subprocess.Popen[str]] = []

    def begin(arguments: list[str]) -> subprocess.Popen[str]:
        command = [sys.executable, *arguments]
        started.append(LoadedPython(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
        return started[-1]

    yield begin
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture
def launch(launch_command: Launch) -> Callable[..., subprocess.Popen[str]]:
    """Return a function that starts `telegrad run` as a separate process."""
    return lambda *arguments: launch_command(["-m", "telegrad.cli", "run", *arguments])


@pytest.fixture
def launch_python(
    launch_command: Launch,
) -> Callable[[str], subprocess.Popen[str]]:
    """Return a function that starts a Python program, given as text, as a separate process."""
    return lambda program: launch_command(["-c", program])
