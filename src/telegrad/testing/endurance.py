"""Disturbs a group of four processes every two seconds, and checks that it neither fails nor grows.

``python -m telegrad.testing.endurance --minutes 10``. The group trains and calls (`endurance_worker`). The faults: the
TCP connections of a worker are shut down, or a worker is stopped for up to 1.5 seconds. With ``--kills`` the last
worker is also killed, again and again, and the launcher starts it again. The resident memory, threads and descriptors
of every worker that lives through the run are recorded. Each median of the last fifth of the run is compared with that
of the second fifth.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

WORKERS = tuple(f"worker{rank}" for rank in range(4))
VICTIM = WORKERS[-1]
"""The worker that is killed."""
PERIOD = 2.0
"""Seconds between two faults."""
START, END = 300.0, 150.0
"""Seconds in which the group must have started, on a busy machine, and must have ended after the last fault."""
ALLOWED = {"memory": 8.0, "threads": 4.0, "descriptors": 4.0}
"""By how much a median may grow: MB, and numbers."""
SHORTEST = 15.0
"""Seconds that a run must take at least."""
_SAMPLES = 0.5  # seconds between two samples


@dataclass
class Samples:
    """What one process used over time."""

    pid: int
    values: dict[str, list[float]] = field(default_factory=lambda: {what: [] for what in ALLOWED})

    def take(self) -> None:
        """Add a sample. Raises ProcessLookupError or FileNotFoundError if the process has ended."""
        status = dict(
            line.split(":", 1) for line in Path(f"/proc/{self.pid}/status").read_text().splitlines() if ":" in line
        )
        if "VmRSS" not in status:
            raise ProcessLookupError(f"process {self.pid} is a zombie")
        descriptors = len(os.listdir(f"/proc/{self.pid}/fd"))  # before anything is added: the process may have ended
        self.values["memory"].append(int(status["VmRSS"].split()[0]) / 1024)
        self.values["threads"].append(int(status["Threads"]))
        self.values["descriptors"].append(descriptors)

    def medians(self, what: str) -> tuple[float, float]:
        """Return the medians of the second and the last fifth of the run, or of the only sample."""
        values = self.values[what]
        fifth = max(1, len(values) // 5)
        return statistics.median(values[fifth : 2 * fifth] or values), statistics.median(values[-fifth:])


@dataclass(frozen=True)
class Outcome:
    """The result of a run."""

    faults: Counter[str]
    counts: dict[str, Counter[str]]
    """What each worker has counted."""
    samples: dict[str, Samples]
    """What each worker used that lived through the whole run."""
    failures: list[str]
    """What is wrong; empty if nothing is."""

    def report(self) -> str:
        """Return a table of what was used, and what was counted."""
        lines = [f"faults: {dict(self.faults)}"]
        lines += [f"{name}: {dict(counted)}" for name, counted in sorted(self.counts.items())]
        lines += ["", "| worker | memory (MB) | threads | descriptors |", "| --- | --- | --- | --- |"]
        for name, samples in sorted(self.samples.items()):
            if not samples.values["memory"]:
                continue  # the group ended before the first sample
            medians = [samples.medians(what) for what in ALLOWED]
            lines.append(
                f"| {name} | " + " | ".join(f"{before:.0f} to {after:.0f}" for before, after in medians) + " |"
            )
        return "\n".join([*lines, *self.failures])


def growth(samples: Mapping[str, Samples], allowed: Mapping[str, float]) -> list[str]:
    """Return a sentence for each worker and resource of which it used more and more."""
    found = []
    for name, taken in sorted(samples.items()):
        for what, limit in allowed.items():
            before, after = taken.medians(what)
            if after > before + limit:
                found.append(f"FAILED: the {what} of {name} grew from {before:.0f} to {after:.0f}")
    return found


class Endurance:
    """One run."""

    def __init__(
        self, seconds: float, seed: int, allowed: Mapping[str, float], directory: Path, *, kills: bool = False
    ) -> None:
        if seconds < SHORTEST:
            raise ValueError(f"a run of {seconds:g} s is too short to compare its parts: choose {SHORTEST:g} or more")
        self._seconds = seconds
        self._allowed = allowed
        self._kills = kills
        self._kinds = ("cut", "stop", "kill") if kills else ("cut", "stop")
        self._draw = random.Random(seed)
        self._directory = directory
        self._faults: Counter[str] = Counter()
        self._samples: dict[str, Samples] = {}

    def run(self) -> Outcome:
        """Start the group, disturb it until it ends, and return what was seen."""
        launcher = [sys.executable, "-m", "telegrad.cli", "run", "-n", str(len(WORKERS))]
        launcher += ["--restart", "1000", "--restart-window", "10"] if self._kills else []
        arguments = [str(self._directory), str(self._seconds), "kills" if self._kills else "no-kills"]
        group = subprocess.Popen([*launcher, "-m", "telegrad.testing.endurance_worker", *arguments])
        try:
            self._wait_for_start(group)
            with contextlib.suppress(ProcessLookupError, FileNotFoundError):  # a worker died: so does the group
                self._disturb(group)
            code = group.wait(END)
        finally:
            if group.poll() is None:
                group.terminate()
                try:
                    group.wait(END)
                except subprocess.TimeoutExpired:
                    group.kill()
                    group.wait()
        counts = {
            path.stem: Counter(msgspec.json.decode(path.read_bytes(), type=dict[str, int]))
            for path in self._directory.glob("*.json")
        }
        failures = growth(self._samples, self._allowed) if code == 0 else [f"FAILED: the group ended with code {code}"]
        return Outcome(self._faults, counts, self._samples, failures)

    def _wait_for_start(self, group: subprocess.Popen[bytes]) -> None:
        files = {name: self._pid_file(name) for name in WORKERS}
        deadline = time.monotonic() + START
        while missing := [name for name, path in files.items() if not (path.exists() and path.read_text())]:
            if group.poll() is not None:
                raise RuntimeError(f"the group ended with code {group.returncode} before it had started")
            if time.monotonic() > deadline:
                raise TimeoutError(f"{', '.join(missing)} did not join the group within {START:g} s")
            time.sleep(0.05)
        surviving = [name for name in WORKERS if not self._kills or name != VICTIM]
        self._samples = {name: Samples(int(files[name].read_text())) for name in surviving}

    def _pid_file(self, name: str) -> Path:
        return self._directory / f"{name}.pid"

    def _disturb(self, group: subprocess.Popen[bytes]) -> None:
        """Take samples and cause faults until shortly before worker 0 ends the run."""
        begin = time.monotonic()
        end, fault_at, sample_at = begin + self._seconds - PERIOD, begin + PERIOD, begin
        later: list[tuple[float, Callable[[], None]]] = []
        while time.monotonic() < end or later:
            now = time.monotonic()
            if group.poll() is not None:
                return
            if now >= sample_at:
                sample_at += _SAMPLES
                for samples in self._samples.values():
                    samples.take()
            if now >= fault_at and now < end:
                fault_at += PERIOD
                later += self._fault(now)
            for due in [one for one in later if one[0] <= now]:
                later.remove(due)
                due[1]()
            time.sleep(0.02)

    def _fault(self, now: float) -> list[tuple[float, Callable[[], None]]]:
        """Cause a fault, and return what has to be done later, and when."""
        kind, worker = self._draw.choice(self._kinds), self._draw.choice(WORKERS)
        if kind == "kill":
            worker = VICTIM
        if not self._pid_file(worker).exists():
            return []  # it was killed, and has not joined again
        pid = int(self._pid_file(worker).read_text())
        self._faults[kind] += 1
        if kind == "cut":
            Path(self._directory, f"{worker}.cut").touch()
        elif kind == "kill":
            self._pid_file(worker).unlink()
            os.kill(pid, signal.SIGKILL)
        else:
            os.kill(pid, signal.SIGSTOP)
            return [(now + self._draw.uniform(0.1, 1.5), lambda: os.kill(pid, signal.SIGCONT))]
        return []


def run(seconds: float, seed: int = 0, allowed: Mapping[str, float] = ALLOWED, *, kills: bool = False) -> Outcome:
    """Run the group for some time, and return what was seen. `allowed` says by how much the medians may grow."""
    with tempfile.TemporaryDirectory(prefix="tg-") as directory:
        return Endurance(seconds, seed, allowed, Path(directory), kills=kills).run()


def main(arguments: list[str] | None = None) -> int:
    """Run, print the report, and return 1 if something is wrong."""
    parser = argparse.ArgumentParser(description="A group of four processes under faults that must not grow.")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0, help="decides on the faults")
    parser.add_argument("--kills", action="store_true", help=f"kill {VICTIM}, too, which the launcher starts again")
    options = parser.parse_args(arguments)
    outcome = run(options.minutes * 60, options.seed, kills=options.kills)
    sys.stdout.write(outcome.report() + "\n")
    return 1 if outcome.failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
