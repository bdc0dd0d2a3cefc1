"""The `telegrad` command, which starts workers from a shell, and looks at groups that run.

Torch takes seconds to load, so only the commands that need it import it.
"""

from __future__ import annotations

import argparse
import io
import os
import secrets
import select
import sys
from collections.abc import Sequence

from telegrad import __version__
from telegrad.doctor import command as doctor
from telegrad.observe.commands import add_parsers

_RUN_EXAMPLES = """\
examples:
  telegrad run -n 4 train.py --epochs 3     four workers: worker0 to worker3
  telegrad run --names ps,trainer0 main.py  two workers with these names
  telegrad run -n 2 -m package.module       a module instead of a file
  telegrad run -n 4 --restart 3 train.py    start a worker that dies again
  telegrad run --hosts a:2,b:2 train.py     two workers on each of two machines, by ssh
  telegrad run -n 2 --attach worker1 a.py   worker1 has the terminal: breakpoint() and input() work there

All arguments after the script's name are passed to the script. Its standard input is empty. The environment
contains each worker's name and rank and the rendezvous address, so init_rpc() needs no arguments.

The exit code is 0 if every worker exited with 0. Otherwise it is the exit code of the worker that failed
first, or 128 + N if signal N killed it. Ctrl-C interrupts every worker. A second Ctrl-C kills them.

With --restart N, a worker that is killed or exits with a code other than 0 is started again: after 0.1
seconds, then after twice as long each time, up to 10 seconds. When it dies after N restarts within
--restart-window seconds, it has failed. TELEGRAD_RESTART is 0 at its first start, 1 at the next, and so on.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code: 141 if whoever reads the output has left, as `head` does."""
    if sys.stdout is None:  # closed by the shell
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - open until the end
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # names of functions may have any characters
    try:
        try:
            return _run_command(arguments)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        if not _reader_has_left():
            raise
        # Exit without a message, and leave Python nothing that it could fail to flush.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def _reader_has_left() -> bool:
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    return any(state & select.POLLERR for _, state in poll.poll(0))


def _run_command(arguments: Sequence[str] | None) -> int:
    options = _parse(arguments)
    if "run" in options:
        code: int = options.run(options)
        return code
    if options.command == "token":
        print(secrets.token_hex(32))
        return 0
    if options.command == "k8s":
        return _k8s(options)
    if options.command == "doctor":
        return doctor.run(options)
    return _run_on_hosts(options) if options.hosts else _run(options)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the options. Those that a command does not know are errors of the command, with its usage."""
    parser, commands = _parser()
    options, unknown = parser.parse_known_args(arguments)
    if unknown:
        commands.choices[options.command].error(f"unrecognized arguments: {' '.join(unknown)}")
    return options


def _parser() -> tuple[argparse.ArgumentParser, argparse._SubParsersAction[argparse.ArgumentParser]]:
    """Return the parser, and the parsers of its commands."""
    parser = argparse.ArgumentParser(
        prog="telegrad",
        description="Autograd across machines: start workers, create their shared secret, and look at "
        "what a running group does.",
    )
    parser.add_argument("--version", action="version", version=f"telegrad {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    run = commands.add_parser(
        "run",
        help="start a script as several workers on this machine, or on others by ssh",
        description="Start a script as several workers on this machine, or on others by ssh. When one fails, "
        "all are stopped, unless --restart or --keep-going says otherwise.",
        epilog=_RUN_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    run.add_argument("-n", "--workers", type=int, metavar="N", help="number of workers to start")
    run.add_argument("--names", metavar="A,B,C", help="names of the workers (default: worker0, worker1, ...)")
    run.add_argument("--hosts", metavar="A:N,B:N", help="run on these machines by ssh, with so many workers on each")
    run.add_argument("-m", "--module", action="store_true", help="treat SCRIPT as a module name, as in python -m")
    run.add_argument(
        "--no-prefix", action="store_true", help="let the workers write directly to this terminal, without prefixes"
    )
    run.add_argument(
        "--grace",
        type=float,
        default=5.0,
        metavar="SECONDS",
        help="time that a worker has to stop before it is killed (default: 5)",
    )
    run.add_argument(
        "--restart",
        type=int,
        default=0,
        metavar="N",
        help="start a worker that dies again, at most N times within the window (default: 0)",
    )
    run.add_argument(
        "--restart-window",
        type=float,
        default=300.0,
        metavar="SECONDS",
        help="time within which restarts of a worker are counted (default: 300)",
    )
    run.add_argument(
        "--keep-going", action="store_true", help="when a worker fails, let the others finish instead of stopping them"
    )
    run.add_argument(
        "--devices-per-worker",
        type=int,
        metavar="N",
        help="assign N accelerators to each worker: N consecutive ones, in the order of the workers",
    )
    run.add_argument(
        "--drop-in",
        action="store_true",
        help="replace torch.distributed.rpc and related modules by telegrad in the script",
    )
    run.add_argument("--attach", metavar="NAME", help="give this worker the terminal, for breakpoint() and input()")
    run.add_argument("--log-dir", metavar="DIR", help="also write the output of each worker to DIR/NAME.log")
    run.add_argument("script", metavar="SCRIPT", help="the Python file to run")
    run.add_argument("arguments", metavar="...", nargs=argparse.REMAINDER, help="arguments for the script")
    commands.add_parser(
        "token",
        help="create a token for a group that spans machines",
        description="Print a new secret. Set TELEGRAD_TOKEN to it on every machine of the group, and keep it secret.",
    )
    _add_k8s(commands)
    add_parsers(commands)
    doctor.add_parser(commands)
    return parser, commands


def _add_k8s(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    k8s = commands.add_parser(
        "k8s",
        help="print a Kubernetes manifest of a group",
        description="Print the manifest of an Indexed Job with a headless service, for kubectl apply -f. "
        "Each pod is a worker. The token comes from a Secret, which the first line of the output creates.",
    )
    k8s.add_argument("--image", required=True, help="the container image, with telegrad and the program")
    k8s.add_argument("-n", "--workers", type=int, required=True, metavar="N", help="number of workers")
    k8s.add_argument("--name", default="telegrad", help="name of the job and its service (default: telegrad)")
    k8s.add_argument("--secret", default="telegrad", help="name of the Secret with the token (default: telegrad)")
    k8s.add_argument("--port", type=int, default=29500, help="port of the rendezvous (default: 29500)")
    k8s.add_argument("--restart", type=int, default=0, metavar="N", help="replace a pod that fails, at most N times")
    k8s.add_argument(
        "--limit",
        action="append",
        default=[],
        metavar="RESOURCE=AMOUNT",
        help="a resource of each pod, as in nvidia.com/gpu=1; may be given several times",
    )
    k8s.add_argument("--jobset", action="store_true", help="a JobSet instead of a Job; it restarts all pods")
    k8s.add_argument("program", metavar="COMMAND", nargs="+", help="what the container runs, as in python train.py")


def _k8s(options: argparse.Namespace) -> int:
    from telegrad.launch.kubernetes import Manifest, render

    try:
        wrong = [limit for limit in options.limit if not all(limit.partition("="))]
        if wrong:
            raise ValueError(f"--limit must be given as in nvidia.com/gpu=1, not {wrong[0]!r}")
        resources = dict(limit.split("=", 1) for limit in options.limit)
        manifest = Manifest(
            options.image,
            options.program,
            options.workers,
            options.name,
            options.secret,
            options.port,
            options.restart,
            resources,
            options.jobset,
        )
    except ValueError as error:
        print(f"telegrad k8s: {error}", file=sys.stderr)
        return 2
    print(render(manifest), end="")
    return 0


def _run_on_hosts(options: argparse.Namespace) -> int:
    from telegrad.errors import TelegradError
    from telegrad.launch import ssh
    from telegrad.launch.local_rendezvous import worker_names

    try:
        unsupported = {
            "--restart": options.restart,
            "--keep-going": options.keep_going,
            "--devices-per-worker": options.devices_per_worker,
            "--drop-in": options.drop_in,
            "--attach": options.attach,
            "--log-dir": options.log_dir,
        }
        for option, given in unsupported.items():
            if given:
                raise ValueError(f"{option} cannot be used with --hosts")
        places = sum(ssh.parse_hosts(options.hosts).values())
        if options.names is None and options.workers is None:
            options.workers = places
        names = worker_names(places) if options.names is None else _names(options)
        if len(names) != places or options.workers not in (None, places):
            raise ValueError(f"--hosts has places for {places} workers, but {options.workers or len(names)} are given")
    except ValueError as error:
        print(f"telegrad run: {error}", file=sys.stderr)
        return 2
    command = ["-m", options.script] if options.module else [options.script]
    try:
        return ssh.run(
            [*command, *options.arguments], options.hosts, names, prefix=not options.no_prefix, grace=options.grace
        )
    except TelegradError as error:
        print(f"telegrad run: {error}", file=sys.stderr)
        return 1


def _run(options: argparse.Namespace) -> int:
    from telegrad.drop_in.subprocesses import install_in_subprocesses
    from telegrad.errors import TelegradError
    from telegrad.launch.local_rendezvous import device_shares
    from telegrad.launch.restarts import RestartPolicy
    from telegrad.launch.run import run
    from telegrad.transport.ports import PORTS_VARIABLE, parse_ports

    try:
        names = _names(options)
        if not options.module and not os.path.exists(options.script):
            raise ValueError(f"file not found: {options.script!r}")
        if options.grace < 0:
            raise ValueError(f"--grace must be a number of seconds, at least 0, not {options.grace:g}")
        if options.attach is not None and options.attach not in names:
            raise ValueError(f"--attach names {options.attach!r}, but the workers are {', '.join(names)}")
        if options.log_dir and options.no_prefix:
            raise ValueError("--log-dir needs the output of the workers, which --no-prefix sends to the terminal")
        restarts = RestartPolicy(options.restart, options.restart_window)
        device_shares(len(names), options.devices_per_worker)  # raises if there are too few
        if ports := os.environ.get(PORTS_VARIABLE, "").strip():
            parse_ports(ports)
    except ValueError as error:
        print(f"telegrad run: {error}", file=sys.stderr)
        return 2
    if options.drop_in:
        install_in_subprocesses()
    command = ["-m", options.script] if options.module else [options.script]
    try:
        return run(
            [*command, *options.arguments],
            names,
            prefix=not options.no_prefix,
            grace=options.grace,
            devices_per_worker=options.devices_per_worker,
            restarts=restarts,
            keep_going=options.keep_going,
            attach=options.attach,
            log_dir=options.log_dir,
        )
    except TelegradError as error:
        print(f"telegrad run: {error}", file=sys.stderr)
        return 1


def _names(options: argparse.Namespace) -> list[str]:
    from telegrad.launch.local_rendezvous import worker_names

    if options.names is None and options.workers is None:
        after = next((text for text in options.arguments if text.startswith(("-n", "--names", "--workers"))), None)
        if after is not None:
            raise ValueError(
                f"{after} is after the script, so it is an argument of the script: write it first, as in "
                f"`telegrad run -n 2 {options.script}`"
            )
        raise ValueError("specify the workers to start with -n N or --names A,B,C")
    if options.names is None:
        return worker_names(options.workers)
    names = worker_names(options.names.split(","))
    if options.workers not in (None, len(names)):
        raise ValueError(f"-n requests {options.workers} workers, but --names has {len(names)} names")
    return names


if __name__ == "__main__":
    sys.exit(main())
