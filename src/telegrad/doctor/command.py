"""The command `telegrad doctor`."""

from __future__ import annotations

import argparse
import os
import socket
import sys
from collections.abc import Callable, Mapping, Sequence

from telegrad.doctor import machine_checks, settings_checks
from telegrad.doctor.finding import Finding, as_json, as_text
from telegrad.doctor.listener import Listener
from telegrad.doctor.reach import DEFAULT_PORT, Target, check_host, parse_targets
from telegrad.environment.launchers import BY_HAND
from telegrad.environment.nodelist import expand
from telegrad.errors import RendezvousError, TelegradError

_EPILOG = """\
examples:
  telegrad doctor                          this machine and its settings
  telegrad doctor --listen                 answer the doctors of other machines, until Ctrl-C
  telegrad doctor --hosts node2,node3      can this machine reach these? With --listen there: MTU, token and clock, too
  srun telegrad doctor                     in a job: every task checks itself and the nodes of the job

The exit code is 1 if there is a problem, and 0 if there are only warnings.
"""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to those of `telegrad`."""
    parser = commands.add_parser(
        "doctor",
        help="find out what is wrong with this machine, its settings and its network",
        description="Check this machine, the settings in its environment, and whether it reaches other machines. Each "
        "problem comes with its remedy.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--hosts", default="", metavar="A,B:PORT", help="other machines of the group")
    parser.add_argument(
        "--listen",
        nargs="?",
        type=int,
        const=DEFAULT_PORT,
        metavar="PORT",
        help=f"answer the doctors of other machines at this port (default: {DEFAULT_PORT})",
    )
    parser.add_argument("--workers", type=int, default=2, metavar="N", help="size of the group (default: 2)")
    parser.add_argument(
        "--timeout", type=float, default=3.0, metavar="SECONDS", help="time to wait for each host (default: 3)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(options: argparse.Namespace, environ: Mapping[str, str] = os.environ) -> int:
    """Run the command, and return its exit code."""
    try:
        targets = parse_targets(options.hosts)
    except ValueError as error:
        print(f"telegrad doctor: {error}", file=sys.stderr)
        return 2
    if options.listen is not None:
        return _listen(options.listen, environ)
    findings = examine(environ, targets, options.workers, options.timeout)
    print(as_json(findings) if options.json else as_text(findings))
    return 1 if any(one.level == "problem" for one in findings) else 0


def examine(environ: Mapping[str, str], targets: Sequence[Target], workers: int, timeout: float) -> list[Finding]:
    """Run all checks."""
    launcher, detected = settings_checks.check_launcher(environ)
    hosts = [*targets, *_hosts_of_launcher(environ, targets)]
    place = None if detected is None else detected.place
    rank = place.rank if place is not None and place.launcher == BY_HAND else None
    rank_0 = settings_checks.rank_0_elsewhere(environ)
    if rank_0 is not None and rank != 0 and rank_0[0] not in [target.host for target in hosts]:
        hosts.append(Target(*rank_0))
    workers = max(workers, (place.size or 0) if place else 0)
    here = (place.local_size or 1) if place else 1
    several = (
        bool(hosts)
        or rank_0 is not None
        or (place is not None and (place.size or 1) > (place.local_size or place.size or 1))
    )
    token, secret = settings_checks.check_token(environ, several_hosts=several)
    checks: list[Callable[[], Finding | list[Finding]]] = [
        machine_checks.check_python,
        machine_checks.check_torch,
        lambda: machine_checks.check_descriptors(workers),
        machine_checks.check_threads,
        lambda: machine_checks.check_memory(environ),
        lambda: machine_checks.check_runtime_directory(environ),
        lambda: machine_checks.check_interfaces(environ),
        machine_checks.check_clock,
        lambda: settings_checks.check_options(environ),
        lambda: launcher,
        lambda: settings_checks.check_rendezvous(environ, several_hosts=several, rank=rank),
        lambda: token,
        lambda: settings_checks.check_ports(environ, here),
        lambda: settings_checks.check_proxies(environ),
        *(lambda target=target: check_host(target, secret, timeout) for target in hosts),
    ]
    found: list[Finding] = []
    for check in checks:
        result = check()
        found += [result] if isinstance(result, Finding) else result
    return found


def _hosts_of_launcher(environ: Mapping[str, str], targets: Sequence[Target]) -> list[Target]:
    """Return the other nodes of a Slurm job, unless hosts are given."""
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST")
    if targets or not nodes:
        return []
    try:
        names = expand(nodes)
    except RendezvousError:  # the launcher's check says so
        return []
    return [Target(name) for name in names if name != environ.get("SLURMD_NODENAME")]


def _listen(port: int, environ: Mapping[str, str]) -> int:
    try:
        _, token = settings_checks.check_token(environ, several_hosts=True)
        listener = Listener("::" if socket.has_dualstack_ipv6() else "0.0.0.0", port, token)
    except (OSError, TelegradError) as error:
        print(f"telegrad doctor: cannot listen at port {port}: {error}", file=sys.stderr)
        return 1
    print(f"answering doctors at port {listener.port}; Ctrl-C ends it", flush=True)
    try:
        listener.serve()
    except KeyboardInterrupt:
        return 0
    return 0
