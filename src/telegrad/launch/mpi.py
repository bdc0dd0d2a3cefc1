"""Runs a function on the workers of a new group, which `mpirun` starts: Open MPI, MPICH, or Intel MPI.

The workers do not use MPI. This is for clusters where mpirun is the way to start processes.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any, Unpack

from telegrad.launch.engines import RUNNER, EngineOptions, check_installed, start_by_command
from telegrad.launch.runner_channel import KEY_VARIABLE, VARIABLE
from telegrad.launch.runner_group import RunnerGroup

_VERSION_TIMEOUT = 60


def start(
    fn: Callable[..., Any],
    workers: int | Sequence[str],
    args: Sequence[Any] = (),
    *,
    command: str = "mpirun",
    address: str | None = None,
    **others: Unpack[EngineOptions],
) -> RunnerGroup:
    """Start a group like `telegrad.launch.start`, by mpirun: with `prefix`, `init` and `init_options` as there.

    `options` are those of mpirun, as in ``["--hostfile", "hosts"]``. `command` names another one, such as
    ``mpiexec.hydra``. `address` is one of this machine that the hosts can reach, if not the first that answers. All
    must be connected after `start_timeout` seconds (600).
    """

    def words(processes: int, options: Sequence[str]) -> Sequence[str]:
        check_installed(command)
        # Open MPI passes on variables that are named; the others pass on all.
        exported = ["-x", VARIABLE, "-x", KEY_VARIABLE] if _is_open_mpi(command) else []
        return [command, "-n", str(processes), *exported, *options, sys.executable, *RUNNER]

    return start_by_command(command, words, fn, workers, args, address=address, **others)


def _is_open_mpi(command: str) -> bool:
    found = subprocess.run(
        [command, "--version"], capture_output=True, text=True, timeout=_VERSION_TIMEOUT, check=False
    )
    return any(word in found.stdout + found.stderr for word in ("Open MPI", "OpenRTE", "open-mpi.org"))
