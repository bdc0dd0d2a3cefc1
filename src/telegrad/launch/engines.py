"""What the engines share that start runners by one command: arguments of `start`, and the command's environment."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypedDict

from telegrad.connection.token_source import TOKEN_VARIABLES
from telegrad.errors import TelegradError
from telegrad.launch.local_rendezvous import worker_names
from telegrad.launch.runner_engine import Engine, Work
from telegrad.launch.runner_group import START_TIMEOUT, RunnerGroup
from telegrad.launch.runner_listener import RunnerListener, launcher_addresses
from telegrad.launch.work import dump_work

RUNNER = ("-m", "telegrad.launch.runner")
_PLACE = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"),
    *("TELEGRAD_INIT_METHOD", "TELEGRAD_NAME", "TELEGRAD_RESTART", "TELEGRAD_AWAITED_REPLACEMENT"),
    *("PMI_RANK", "PMI_SIZE", "PMI_JOBID", "PMI_FD", "JOB_COMPLETION_INDEX"),
)
_PLACE_PREFIXES = ("TORCHELASTIC_", "OMPI_COMM_WORLD_", "MPI_LOCAL")
_OPEN_MPI_JOB = (
    *("OMPI_APP_CTX_", "OMPI_ARGV", "OMPI_COMMAND", "OMPI_FILE_LOCATION", "OMPI_FIRST_RANKS", "OMPI_NUM_APP_CTX"),
    *("OMPI_UNIVERSE_SIZE", "OMPI_MCA_ess", "OMPI_MCA_initial_wdir", "OMPI_MCA_orte_", "OMPI_MCA_pmix", "PMIX_"),
)
"""How variables begin that mpirun sets for its processes. With them, another mpirun refuses to start."""
_GROUP_SETTINGS = (
    *("TELEGRAD_ACCEPT", "TELEGRAD_PORTS", "TELEGRAD_SHARED_MEMORY", "TELEGRAD_SPIN"),
    *("TELEGRAD_TLS", "TELEGRAD_TRANSPORTS"),
)


def make_work(
    fn: Callable[..., Any],
    workers: int | Sequence[str],
    args: Sequence[Any],
    *,
    prefix: bool,
    init: bool,
    init_options: Mapping[str, Any] | None,
) -> Work:
    """Return the work of a group that calls a function. Raises as `telegrad.launch.base` says."""
    return Work(
        worker_names(workers),
        dump_work(fn, args, init_options),
        init=init,
        environment=group_settings(os.environ),
        token=secrets.token_hex(32),
        directory=os.getcwd(),
        path=[entry or os.getcwd() for entry in sys.path],
        prefix=prefix,
    )


class EngineOptions(TypedDict, total=False):
    """The arguments of `start` that the engines have in common that start all runners by one command."""

    prefix: bool
    init: bool
    init_options: Mapping[str, Any] | None
    options: Sequence[str]
    """Those of the command."""
    start_timeout: float
    """Seconds until all workers must be connected."""


def start_by_command(
    name: str,
    make_command: Callable[[int, Sequence[str]], Sequence[str]],
    fn: Callable[..., Any],
    workers: int | Sequence[str],
    args: Sequence[Any],
    *,
    address: str | None = None,
    restarts: bool = False,
    prefix: bool = True,
    init: bool = True,
    init_options: Mapping[str, Any] | None = None,
    options: Sequence[str] = (),
    start_timeout: float = START_TIMEOUT,
) -> RunnerGroup:
    """Start the command of an engine, which starts the runners of all workers. They connect to this process.

    `make_command` returns it for a number of workers and the user's options. `address` is one of this machine that all
    runners can reach; None: all that it has are tried. The rest is as in `telegrad.launch.start`.
    """
    work = make_work(fn, workers, args, prefix=prefix, init=init, init_options=init_options)
    command = make_command(len(work.names), options)
    check_installed(command[0])
    listener = RunnerListener(launcher_addresses() if address is None else [address])
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            env={**without_place(os.environ), **listener.invitation.environment()},
            start_new_session=True,  # Ctrl-C is for the launcher, which stops the group
        )
    except BaseException:
        listener.close()
        raise
    return RunnerGroup(work, Engine(name, [process], listener=listener, restarts=restarts), start_timeout=start_timeout)


def check_installed(command: str) -> None:
    """Raise a TelegradError if there is no such command."""
    if shutil.which(command) is None:
        raise TelegradError(f"the command {command} is not installed on this machine, or not in PATH")


def group_settings(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the settings that count for all workers: not every engine passes the environment on to other hosts.

    >>> group_settings({"TELEGRAD_PORTS": "29600-29663", "TELEGRAD_INTERFACE": "eth1"})
    {'TELEGRAD_PORTS': '29600-29663'}
    """
    return {name: environ[name] for name in _GROUP_SETTINGS if environ.get(name)}


def without_place(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without a token, and without the place of this process in a group.

    It may be a worker itself, or inherit variables from one. The runners would take its rank for theirs. The variables
    of Slurm stay, because they name the allocation in which srun and mpirun start processes.

    >>> without_place({"RANK": "1", "OMPI_COMM_WORLD_RANK": "1", "SLURM_JOB_ID": "7", "HOME": "/root"})
    {'SLURM_JOB_ID': '7', 'HOME': '/root'}
    """
    place = {*_PLACE, *(["TELEGRAD_RUNTIME_DIR"] if environ.get("TELEGRAD_INIT_METHOD") else [])}
    prefixes = (*_PLACE_PREFIXES, *(_OPEN_MPI_JOB if "OMPI_COMM_WORLD_RANK" in environ else ()))
    return {
        name: value
        for name, value in without_tokens(environ).items()
        if name not in place and not name.startswith(prefixes)
    }


def without_tokens(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without a token: the group gets its own."""
    return {name: value for name, value in environ.items() if name not in TOKEN_VARIABLES}
