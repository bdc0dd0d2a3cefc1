"""A real Slurm cluster on this machine: munged, slurmctld, and one slurmd for each node, in a temporary directory.

The nodes are processes on one host, on loopback. Needs root and Debian's packages slurm-wlm and munge.
"""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

PATIENCE = 60.0
CPUS = 8
"""Of each node: more than there are, as the tests mostly wait."""

_CONF = """\
ClusterName=telegrad
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={directory}/munge/socket
CredType=cred/munge
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool-%n
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/slurmd-%n.pid
SlurmctldLogFile={directory}/slurmctld.log
SlurmdLogFile={directory}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
ReturnToService=2
SchedulerType=sched/builtin
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SlurmdParameters=config_overrides
KillWait=2
InactiveLimit=0
MailProg=/bin/true
{nodes}
PartitionName=all Nodes={names} Default=YES MaxTime=INFINITE State=UP OverSubscribe=YES
"""


def why_not() -> str:
    """Return why there can be no cluster here; empty if nothing prevents it."""
    missing = [command for command in ("slurmctld", "slurmd", "srun", "munged") if shutil.which(command) is None]
    if missing:
        return f"{', '.join(missing)} not installed (apt-get install slurm-wlm munge)"
    return "" if os.geteuid() == 0 else "slurmd and munged need root"


@contextmanager
def slurm_cluster() -> Iterator[dict[str, str]]:
    """Run a cluster of two nodes, and yield the variables with which srun and sbatch find it."""
    host = socket.gethostname()
    nodes = (host, f"{host}2")  # Workers have to know the address of the first.
    with ExitStack() as stack:
        directory = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))
        stack.callback(shutil.rmtree, directory, ignore_errors=True)
        directory.chmod(0o755)
        for name in ("munge", "state"):
            (directory / name).mkdir(mode=0o700)
        controller, *ports = _free_ports(1 + len(nodes))
        lines = [
            f"NodeName={name} NodeAddr=127.0.0.1 NodeHostname={host} Port={port} CPUs={CPUS} State=UNKNOWN"
            for name, port in zip(nodes, ports, strict=True)
        ]
        conf = directory / "slurm.conf"
        conf.write_text(
            _CONF.format(
                host=host,
                controller=controller,
                directory=directory,
                nodes="\n".join(lines),
                names=",".join(nodes),
            )
        )
        environment = {"SLURM_CONF": str(conf)}
        key = directory / "munge" / "key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o600)
        munge = directory / "munge"
        stack.enter_context(
            _daemon(
                [
                    *("munged", "-F", "--force", f"--key-file={key}", f"--socket={munge}/socket"),
                    *(f"--pid-file={munge}/pid", f"--log-file={munge}/log", f"--seed-file={munge}/seed"),
                ],
                environment,
            )
        )
        _wait_until((munge / "socket").exists, "munged")
        stack.enter_context(_daemon(["slurmctld", "-D", "-f", str(conf)], environment))
        for name in nodes:
            stack.enter_context(_daemon(["slurmd", "-D", "-N", name, "-f", str(conf)], environment))
        _wait_until(lambda: _idle(environment) == len(nodes), "idle nodes")
        yield environment


def _idle(environment: dict[str, str]) -> int:
    done = subprocess.run(
        ["sinfo", "-h", "-N", "-o", "%t"],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    return done.stdout.split().count("idle")


@contextmanager
def _daemon(command: Sequence[str], environment: dict[str, str]) -> Iterator[None]:
    quiet = subprocess.DEVNULL
    process = subprocess.Popen(command, env={**os.environ, **environment}, stdin=quiet, stdout=quiet, stderr=quiet)
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [one.getsockname()[1] for one in sockets]


def _wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        if time.monotonic() >= deadline:
            raise TimeoutError(f"{what} did not come up within {PATIENCE:g} s")
        time.sleep(0.1)
