"""Runs a group of three processes, disturbs it, and records what the caller saw."""

from __future__ import annotations

import json
import os
import secrets
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.support.fault_worker import LOOPS, WORKERS
from tests.support.namespaces import Network
from tests.support.paths import ROOT

START = 120.0
"""Seconds in which the group must have started."""
PATIENCE = 100.0
"""Seconds in which anything must have been seen that a loss or a return leads to."""
STEPS = 10
"""Steps of each loop that show that it works."""
END = 60.0
"""Seconds in which all workers must have left the group."""


@dataclass(frozen=True)
class Step:
    """One step of a loop. Times are those of `time.monotonic`."""

    loop: str
    number: int
    begin: float
    end: float
    error: tuple[str, str] | None
    """The type and the text of the error, if there was one."""


class FaultRun:
    """A running group, and the steps of its worker a until now."""

    def __init__(self, network: Network | None, directory: Path) -> None:
        self.network = network
        self.directory = directory
        self.steps: list[Step] = []
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.dead: set[str] = set()
        """Workers that a test has killed."""
        self.left: dict[str, float] = {}
        """The workers that have left the group at the end, and the seconds that it took them."""
        self._buffers: dict[str, bytes] = {}
        environment = {
            **os.environ,
            "PYTHONPATH": f"{ROOT}:{ROOT / 'src'}",
            "TELEGRAD_TOKEN": secrets.token_hex(32),
            "OMP_NUM_THREADS": "1",
        }
        for name in WORKERS:
            address = [] if network is None else [network.address(name)]
            program = [sys.executable, "-m", "tests.support.fault_worker", name, str(directory / "rendezvous")]
            with (directory / f"{name}.log").open("wb") as log:
                self.processes[name] = subprocess.Popen(
                    [*(network.inside(name) if network is not None else ()), *program, *address],
                    env=environment,
                    cwd=ROOT,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                )
            self._buffers[name] = b""

    # -- observing --------------------------------------------------------------------------------------------

    def watch(self, until: Callable[[], bool], limit: float, what: str) -> None:
        """Read what the workers write until a condition holds. Raises if that takes more than `limit` seconds."""
        deadline = time.monotonic() + limit
        while not until():
            if time.monotonic() > deadline:
                raise AssertionError(f"{what}: not within {limit:g} s\n{self.logs()}")
            self._read(min(0.1, max(0.0, deadline - time.monotonic())))

    def watch_for(self, seconds: float) -> None:
        """Read what the workers write for some time."""
        end = time.monotonic() + seconds
        self.watch(lambda: time.monotonic() >= end, seconds + 1.0, "the time passes")

    def wait_for_steps(self, loops: list[str], limit: float = PATIENCE) -> None:
        """Wait until each of these loops has made some more steps without an error."""
        since = time.monotonic()

        def made() -> bool:
            good = [s.loop for s in self.steps if s.error is None and s.begin >= since]
            return all(good.count(loop) >= STEPS for loop in loops)

        self.watch(made, limit, f"{STEPS} further steps of {', '.join(loops)}")

    def wait_for_errors(self, loops: list[str], kind: str, limit: float = PATIENCE) -> None:
        """Wait until the last step of each of these loops has failed with an error of this type."""

        def failed() -> bool:
            last = {s.loop: s.error for s in self.steps}
            return all((error := last.get(loop)) is not None and error[0] == kind for loop in loops)

        self.watch(failed, limit, f"{kind} in {', '.join(loops)}")

    def _read(self, seconds: float) -> None:
        outputs = {process.stdout: name for name, process in self.processes.items() if process.stdout is not None}
        open_outputs = [output for output in outputs if not output.closed]
        for output in select.select(open_outputs, [], [], seconds)[0]:
            name = outputs[output]
            piece = os.read(output.fileno(), 65536)
            if not piece:
                output.close()
                if name not in self.dead and name not in self.left:
                    raise AssertionError(f"worker {name} ended\n{self.logs()}")
            *lines, self._buffers[name] = (self._buffers[name] + piece).split(b"\n")
            for line in lines:
                self._take(json.loads(line))

    def _take(self, said: dict[str, object]) -> None:
        if "left" in said:
            self.left[str(said["left"])] = float(str(said["took"]))
        elif "loop" in said:
            self.steps.append(Step(**said))  # type: ignore[arg-type]  # as `fault_worker` writes them

    def logs(self) -> str:
        """Return the ends of all logs, and the last steps."""
        texts = [f"--- {path.name}\n{path.read_text()[-3000:]}" for path in sorted(self.directory.glob("*.log"))]
        return "\n".join([*texts, "--- steps", *map(str, self.steps[-10:])])

    # -- disturbing -------------------------------------------------------------------------------------------

    def signal(self, name: str, number: signal.Signals) -> None:
        """Send a signal to a worker."""
        if number == signal.SIGKILL:
            self.dead.add(name)
        os.kill(self.processes[name].pid, number)

    # -- ending -----------------------------------------------------------------------------------------------

    def end(self) -> None:
        """Let all workers that live leave the group, and check that they do."""
        living = [name for name in WORKERS if name not in self.dead]
        for name in living:
            stdin = self.processes[name].stdin
            assert stdin is not None
            stdin.close()
        self.watch(lambda: set(living) <= set(self.left), END, "the workers leave the group")
        for name in living:
            assert self.processes[name].wait(END) == 0, self.logs()

    def kill(self) -> None:
        """End what is still there."""
        for process in self.processes.values():
            process.kill()
            process.wait(PATIENCE)
            for pipe in (process.stdin, process.stdout):
                if pipe is not None and not pipe.closed:
                    pipe.close()


@contextmanager
def fault_run(network: Network | None, directory: Path) -> Iterator[FaultRun]:
    """Start a group whose loops run, and end it."""
    run = FaultRun(network, directory)
    try:
        run.wait_for_steps(list(LOOPS), START)
        yield run
    finally:
        run.kill()
