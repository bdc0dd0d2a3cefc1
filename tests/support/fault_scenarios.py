"""The faults that `tests/behaviour/network` causes, and what the caller may see of each.

``python -m tests.support.fault_scenarios`` causes them all and prints a table of what it saw. ``-k`` selects some.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from signal import SIGCONT, SIGKILL, SIGSTOP

import pytest
from tests.support.fault_run import FaultRun, Step, fault_run
from tests.support.fault_worker import LOOPS, WORKERS
from tests.support.namespaces import Network, network_of

SHORT, LONG = 5.0, 40.0
LAG = 8.0
"""Seconds that a step may take longer than the fault: pauses between attempts, retransmissions, a busy machine."""
ROOM = 1 << 20
"""Bytes of a small tmpfs."""

Fault = Callable[[FaultRun], None]


@dataclass(frozen=True)
class Scenario:
    """A fault of worker b, unless it says otherwise, and the most that worker a may see of it."""

    name: str
    fault: Fault
    """Causes it, waits, and ends it."""
    wait: float
    """The longest time in seconds that a step may take."""
    lost: str = ""
    """The worker that is lost by it."""
    gone: tuple[str, ...] | None = None
    """The loops that need the lost worker. Default: all that call it."""
    at_start: Mapping[str, object] = field(default_factory=dict)
    """Settings of the switch with which the group starts."""
    errors: tuple[str, ...] = ()
    """Other errors that steps may raise in the meantime."""
    disturbs: tuple[str, ...] = ("b", "chain")
    """The loops that notice it. Others make their steps as if nothing happened."""
    slow: bool = False
    """Whether it takes more than a few seconds."""
    unix: bool = False
    """Whether the workers are on one host, and use unix sockets."""


def unplugged(seconds: float) -> Fault:
    """Take the cable out for some time."""

    def fault(run: FaultRun) -> None:
        network(run).unplug("b")
        run.watch_for(seconds)
        network(run).plug("b")

    return fault


def switched(seconds: float, *counters: str, **settings: object) -> Fault:
    """Let the switch misbehave for some time. It must have counted packets of these kinds."""

    def fault(run: FaultRun) -> None:
        network(run).tell_switch(**settings)
        run.watch_for(seconds)
        counts = network(run).tell_switch()
        assert all(counts.get(counter) for counter in counters), counts

    return fault


def parted(run: FaultRun) -> None:
    """Drop all packets between the callees. The caller reaches both."""
    network(run).tell_switch(part=["b", "c"])


def vanished(run: FaultRun) -> None:
    """Let a host disappear: its last packets are lost, and nothing answers at its address."""
    network(run).tell_switch(cut=["b"])
    run.signal("b", SIGKILL)


def rebooted(run: FaultRun) -> None:
    """Let a host disappear and come back without the worker."""
    vanished(run)
    run.watch_for(SHORT)
    network(run).tell_switch()


def killed(name: str = "b") -> Fault:
    """Kill a process. Its system closes the connections."""
    return lambda run: run.signal(name, SIGKILL)


def stopped(name: str, seconds: float) -> Fault:
    """Stop a process for some time."""

    def fault(run: FaultRun) -> None:
        run.signal(name, SIGSTOP)
        run.watch_for(seconds)
        run.signal(name, SIGCONT)

    return fault


def out_of_descriptors(name: str, seconds: float) -> Fault:
    """Let a process open nothing for some time, and reset all connections, so that it has to open new ones."""

    def fault(run: FaultRun) -> None:
        pid = run.processes[name].pid
        limits = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (3, limits[1]))
        switched(seconds, "reset", reset=True)(run)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)

    return fault


def full_tmpfs(run: FaultRun) -> None:
    """Fill the file system of the runtime directory."""
    filler = run.directory / "runtime" / "filler"
    with pytest.raises(OSError, match="No space left"):
        filler.write_bytes(bytes(2 * ROOM))
    run.watch_for(SHORT / 2)
    filler.unlink()


def network(run: FaultRun) -> Network:
    """Return the network of a run that has one."""
    assert run.network is not None
    return run.network


_EXHAUSTED = ("ResourceExhausted",)
SCENARIOS = (
    Scenario("all connections reset", switched(1.0, "reset", reset=True), LAG, disturbs=("b", "c", "chain")),
    Scenario("`kill -9`", killed(), LAG, lost="b"),
    Scenario("`kill -9`, unix socket", killed(), LAG, lost="b", slow=True, unix=True),
    Scenario("full tmpfs, unix socket", full_tmpfs, LAG, disturbs=(), unix=True),
    Scenario("cable unplugged for 5 s", unplugged(SHORT), SHORT + LAG, slow=True),
    Scenario("cable unplugged for 40 s", unplugged(LONG), LONG + LAG, slow=True),
    Scenario("packets dropped for 5 s", switched(SHORT, "cut", cut=["b"]), SHORT + LAG, slow=True),
    Scenario("packets dropped for 40 s", switched(LONG, "cut", cut=["b"]), LONG + LAG, slow=True),
    Scenario("packets of b dropped, not those to b, 40 s", switched(LONG, "cut", mute=["b"]), LONG + LAG, slow=True),
    Scenario("20 % loss for 20 s", switched(20.0, "lost", loss=0.2), 20 + LAG, disturbs=tuple(LOOPS), slow=True),
    Scenario("100 ms delay each way for 10 s", switched(10.0, delay=0.1), LAG, disturbs=tuple(LOOPS), slow=True),
    Scenario(
        "25 % reordered for 10 s",
        switched(10.0, "reordered", reorder=0.25, delay=0.002),
        LAG,
        disturbs=tuple(LOOPS),
        slow=True,
    ),
    Scenario(
        "20 % loss and 50 ms delay from the start, for 10 s more",
        switched(10.0, "lost", loss=0.2, delay=0.05),
        20 + LAG,
        at_start={"loss": 0.2, "delay": 0.05},
        disturbs=tuple(LOOPS),
        slow=True,
    ),
    Scenario(
        "no packets between b and c, for good; b calls c",
        parted,
        60 + LAG,
        lost="c",
        gone=("chain",),
        disturbs=("chain",),
        slow=True,
    ),
    Scenario("host vanishes (half-open)", vanished, 60 + LAG, lost="b", slow=True),
    Scenario("host vanishes, back after 5 s without b", rebooted, SHORT + LAG, lost="b", slow=True),
    Scenario("`kill -STOP`, `-CONT` after 5 s", stopped("b", SHORT), SHORT + LAG, slow=True),
    Scenario("`kill -STOP`, `-CONT` after 40 s", stopped("b", LONG), LONG + LAG, slow=True),
    Scenario("`kill -STOP` of the caller, 40 s", stopped("a", LONG), LONG + LAG, disturbs=tuple(LOOPS), slow=True),
    Scenario("`kill -STOP` for 40 s, unix socket", stopped("b", LONG), LONG + LAG, slow=True, unix=True),
    Scenario(
        "no descriptors on b for 5 s, connections reset",
        out_of_descriptors("b", SHORT),
        SHORT + LAG,
        errors=_EXHAUSTED,
        disturbs=tuple(LOOPS),
        slow=True,
    ),
    Scenario(
        "no descriptors on the caller for 5 s, connections reset",
        out_of_descriptors("a", SHORT),
        SHORT + LAG,
        errors=_EXHAUSTED,
        disturbs=tuple(LOOPS),
        slow=True,
    ),
)


@dataclass(frozen=True)
class Observation:
    """What worker a saw of a fault. Times are in seconds."""

    scenario: Scenario
    errors: dict[str, int]
    """How many steps raised each type of error, in the loops that are not lost for good."""
    lost_after: float | None
    """When the first step raised WorkerLost, from the beginning of the fault."""
    longest: float
    """The longest step."""
    back_after: float | None
    """When all disturbed loops had made a step, from the end of the fault."""
    left_in: float
    """How long leaving the group took at the end."""

    def row(self) -> str:
        """Return a line of the table."""
        if self.lost_after is not None:
            seen = f"`WorkerLost` after {self.lost_after:.1f} s; the rest of the group goes on"
        elif self.errors:
            seen = ", ".join(f"{count} times `{kind}`" for kind, count in self.errors.items())
        else:
            seen = "no error"
        back = "" if self.back_after is None else f"{self.back_after:.1f} s"
        return f"| {self.scenario.name} | {seen} | {self.longest:.1f} s | {back} | {self.left_in:.1f} s |"


HEAD = (
    "| fault | what the caller saw | longest step | all work again | leaving the group |\n"
    "| --- | --- | --- | --- | --- |"
)


@contextmanager
def small_tmpfs(directory: Path) -> Iterator[Path]:
    """Mount a small tmpfs as the runtime directory of the workers, or skip the test."""
    mount = directory / "runtime"
    mount.mkdir(mode=0o700)
    command = ["mount", "-t", "tmpfs", "-o", f"size={ROOM},mode=700", "tmpfs", str(mount)]
    done = subprocess.run(command, capture_output=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"this user cannot mount a tmpfs: {done.stderr.decode().strip()}")
    try:
        yield mount
    finally:
        subprocess.run(["umount", str(mount)], check=True)


def observe(scenario: Scenario, directory: Path) -> Observation:
    """Cause a fault, check what it leads to, and return what was seen."""
    hosts = nullcontext(None) if scenario.unix else network_of(WORKERS)
    with hosts as connected, small_tmpfs(directory) as runtime, pytest.MonkeyPatch.context() as patch:
        patch.setenv("TELEGRAD_RUNTIME_DIR", str(runtime))
        if connected is not None:
            connected.tell_switch(**scenario.at_start)
        with fault_run(connected, directory) as run:
            return _observe(scenario, run)


def _observe(scenario: Scenario, run: FaultRun) -> Observation:
    gone = scenario.gone or tuple(loop for loop, workers in LOOPS.items() if scenario.lost in workers)
    kept = [loop for loop in LOOPS if loop not in gone]
    begin = time.monotonic()
    scenario.fault(run)
    end = time.monotonic()
    if gone:
        run.wait_for_errors(list(gone), "WorkerLost")
    run.wait_for_steps(kept)
    run.end()
    lost: list[Step] = []
    errors: dict[str, int] = {}
    for step in run.steps:
        if step.error is None:
            continue
        kind, text = step.error
        if step.loop in gone and kind == "WorkerLost":
            assert f"worker {scenario.lost!r}" in text, step
            lost.append(step)
            continue
        assert kind in scenario.errors, f"{step}\n{run.logs()}"
        errors[kind] = errors.get(kind, 0) + 1
    took = {loop: max(s.end - s.begin for s in run.steps if s.loop == loop and s.end > begin) for loop in LOOPS}
    for loop, seconds in took.items():
        limit = scenario.wait if loop in scenario.disturbs else LAG / 2
        assert seconds < limit, f"a step of loop {loop} took {seconds:.1f} s\n{run.logs()}"
    good = [s for s in run.steps if s.error is None and s.end > end]
    back = [min(s.end - end for s in good if s.loop == loop) for loop in scenario.disturbs if loop in kept]
    return Observation(
        scenario,
        errors,
        min(s.end - begin for s in lost) if gone else None,
        max(took.values()),
        max(back, default=None),
        max(run.left.values()),
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-k", default="", help="only faults whose name contains this")
    options = parser.parse_args()
    print(HEAD, flush=True)
    for scenario in SCENARIOS:
        if options.k in scenario.name:
            with tempfile.TemporaryDirectory(prefix="tg-") as directory:
                try:
                    print(observe(scenario, Path(directory)).row(), flush=True)
                except AssertionError as error:
                    print(f"| {scenario.name} | FAILED: {error}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
