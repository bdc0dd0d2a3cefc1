"""The engines of `telegrad.launch` as launchers under test, each on the real software, and why one cannot run here.

As a program, it runs the checks of one engine and prints a line of JSON for each: for a launcher inside a network
namespace. Arguments: the engine, and its options as JSON.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from typing import Any

from tests.support import slurm

from telegrad import launch
from telegrad.launch.base import Group
from telegrad.testing.launch_contract import CHECKS, Check, Harness, LauncherUnderTest, NotApplicable

PATIENCE = 200.0
OPEN_MPI = ["--allow-run-as-root", "--oversubscribe"]


def start_open_mpi(*args: Any, **options: Any) -> Group:
    return launch.mpi.start(*args, command="mpirun.openmpi", options=OPEN_MPI, **options)


def start_mpich(*args: Any, **options: Any) -> Group:
    return launch.mpi.start(*args, command="mpirun.mpich", **options)


def start_slurm(*args: Any, **options: Any) -> Group:
    return launch.slurm.start(*args, options=["--overcommit", "--nodes=2"], **options)


def start_torchrun(*args: Any, **options: Any) -> Group:
    return launch.torchrun.start(*args, **options)


def start_ssh(hosts: list[str], ssh: list[str]) -> Callable[..., Group]:
    def start(fn: Any, workers: Any, args: Any, **options: Any) -> Group:
        count = workers if isinstance(workers, int) else len(workers)
        places = {host: count // len(hosts) + (index < count % len(hosts)) for index, host in enumerate(hosts)}
        return launch.ssh.start(fn, workers, args, hosts=places, ssh=ssh, **options)

    return start


ENGINES: Mapping[str, Callable[..., Group]] = {
    "openmpi": start_open_mpi,
    "mpich": start_mpich,
    "slurm": start_slurm,
    "torchrun": start_torchrun,
}


def why_not(engine: str) -> str:
    """Return why an engine cannot run here; empty if nothing prevents it."""
    if os.environ.get("TELEGRAD_TEST_CLUSTER") != "1":
        return "starts real engines: `make test-cluster` runs it"
    if engine == "slurm":
        return slurm.why_not()
    command = {"openmpi": "mpirun.openmpi", "mpich": "mpirun.mpich"}.get(engine)
    if command is not None and shutil.which(command) is None:
        return f"{command} is not installed (apt-get install openmpi-bin mpich)"
    return ""


def outcome(check: Check, start: Callable[..., Group], *, restarts: bool = False) -> str:
    """Run one check, and return what is wrong; empty if nothing is."""
    try:
        with closing(Harness(LauncherUnderTest(start, PATIENCE, restarts))) as harness:
            check(harness)
    except NotApplicable:
        return ""
    except Exception as error:  # noqa: BLE001 - any error means that the check failed
        return f"{error!r} from {error.__cause__!r}"
    return ""


def main() -> None:
    options = json.loads(sys.argv[1])
    start = start_ssh(options["hosts"], options["ssh"])
    for check in CHECKS:
        began = time.monotonic()
        line = {"check": check.__name__, "wrong": outcome(check, start), "seconds": time.monotonic() - began}
        sys.stdout.write(json.dumps(line) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
