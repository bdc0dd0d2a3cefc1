"""Runs a function or a script on the workers of a new group on several machines that ssh reaches.

Nothing has to run there but sshd, and the same Python environment at the same path. Each worker has a connection of its
own, through which its runner gets the work and the token, and sends output and results: nothing secret is in a command
line or in the environment of ssh, and this machine needs no open port. When the connection ends, the worker ends.
"""

from __future__ import annotations

import os
import re
import secrets
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from telegrad.launch.engines import RUNNER, check_installed, group_settings, make_work, without_tokens
from telegrad.launch.run import print_status, shell_code, signals_request_stop
from telegrad.launch.runner_engine import Engine, Work, pipe_channel
from telegrad.launch.runner_group import RunnerGroup
from telegrad.launch.supervisor import GRACE

START_TIMEOUT = 120.0
SSH = ("ssh", "-T", "-o", "BatchMode=yes", "-o", "ServerAliveInterval=15")
"""The command. It asks for no password, and notices when a host is gone."""
_HOST = re.compile(
    r"(?P<user>(?:[^-@\s\[\]][^@\s\[\]]*@)?)"
    r"(?:\[(?P<address>[0-9A-Fa-f:.]+(?:%\w+)?)\]|(?P<name>[^-:@\s\[\]][^:@\s\[\]]*))"
    r"(?::(?P<count>[1-9][0-9]*))?"
)
"""As in user@host:2. An address of IPv6 is in brackets. What begins with "-" would be an option of ssh."""


def parse_hosts(text: str) -> dict[str, int]:
    """Return how many workers each host has.

    >>> parse_hosts("a:2,user@b:2,c,[fd00::1]:2")
    {'a': 2, 'user@b': 2, 'c': 1, 'fd00::1': 2}
    """
    hosts: dict[str, int] = {}
    for item in text.split(","):
        match = _HOST.fullmatch(item.strip())
        host = "" if match is None else f"{match['user']}{match['name'] or match['address']}"
        if match is None or host in hosts:
            raise ValueError(f"hosts must be given as in a:2,b:2 or [fd00::1]:2, each once, not {text!r}")
        hosts[host] = int(match["count"] or 1)
    return hosts


def start(
    fn: Callable[..., Any],
    workers: int | Sequence[str] | None = None,
    args: Sequence[Any] = (),
    *,
    hosts: str | Mapping[str, int],
    prefix: bool = True,
    init: bool = True,
    init_options: Mapping[str, Any] | None = None,
    python: str = sys.executable,
    ssh: Sequence[str] = SSH,
    address: str | None = None,
    start_timeout: float = START_TIMEOUT,
) -> RunnerGroup:
    """Start a group like `telegrad.launch.start`, on these hosts, as in ``hosts="a:2,b:2"``.

    The first workers run on the first host, and so on. `workers` are their names, or as many as the hosts have.
    `python` is the interpreter on the hosts. `ssh` is the command with its options. `address` is one of the first host
    that the others can reach, if not the one that ssh has connected to.
    """
    places = _places(hosts)
    workers = len(places) if workers is None else workers
    work = make_work(fn, workers, args, prefix=prefix, init=init, init_options=init_options)
    return _start(work, places, python, ssh, address, start_timeout)


def run(
    command: Sequence[str],
    hosts: str,
    names: Sequence[str],
    *,
    prefix: bool = True,
    grace: float = GRACE,
    python: str = sys.executable,
    ssh: Sequence[str] = SSH,
) -> int:
    """Run ``python *command`` for each name on these hosts, and return the exit code: see `telegrad.launch.run.run`."""
    work = Work(
        names,
        command=command,
        environment=group_settings(os.environ),
        token=secrets.token_hex(32),
        directory=os.getcwd(),
        prefix=prefix,
        grace=grace,
    )
    group = _start(work, _places(hosts), python, ssh, None, START_TIMEOUT)
    with group, signals_request_stop(group.supervisor.requests):
        group.wait()
    group.check_supervisor()
    if group.supervisor.stop_signal is not None:
        number = signal.Signals(group.supervisor.stop_signal)
        print_status(f"stopped by {number.name}; all workers have exited")
        return 128 + number
    if not group.supervisor.failures:
        return 0
    worker, description = group.supervisor.failures[0].worker, group.supervisor.failures[0].description
    print_status(f"{worker.name} {description}; the other workers were stopped" if worker else description)
    return shell_code(worker.exitcode) or 1 if worker is not None else 1


def _places(hosts: str | Mapping[str, int]) -> list[str]:
    counts = parse_hosts(hosts) if isinstance(hosts, str) else hosts
    for host, count in counts.items():
        if not host or host.startswith("-") or count < 0:
            raise ValueError(f"hosts must have names and numbers of workers, not {host!r}: {count}")
    return [host for host, count in counts.items() for _ in range(count)]


def _start(
    work: Work, places: Sequence[str], python: str, ssh: Sequence[str], address: str | None, start_timeout: float
) -> RunnerGroup:
    if len(places) != len(work.names):
        raise ValueError(f"there are {len(work.names)} workers, but the hosts have places for {len(places)}")
    check_installed(ssh[0])
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank, host in enumerate(places):
            remote = shlex.join([python, *RUNNER, "--stdio", f"--rank={rank}"])
            processes.append(
                subprocess.Popen(
                    # Not `--`: it is the remote shell that gets the rest.
                    [*ssh, host, f"exec {remote}"],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    env=without_tokens(os.environ),
                    start_new_session=True,  # Ctrl-C is for the launcher, which stops the group
                )
            )
    except BaseException:
        for process in processes:
            process.kill()
            process.wait()
        raise
    channels = {rank: pipe_channel(process) for rank, process in enumerate(processes)}
    routes = [f"{ssh[0]} to {host}" for host in places]
    engine = Engine("ssh", processes, channels, routes, address=address)
    return RunnerGroup(work, engine, start_timeout=start_timeout)
