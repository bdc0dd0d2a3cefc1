"""The `telegrad` command, which starts workers from a shell.

Torch takes seconds to load, so only the commands that need it import it.
"""

from __future__ import annotations

import argparse
import os
import secrets
import sys
from collections.abc import Sequence

from telegrad import __version__

_RUN_EXAMPLES = """\
examples:
  telegrad run -n 4 train.py --epochs 3     four workers: worker0 to worker3
  telegrad run --names ps,trainer0 main.py  two workers with these names
  telegrad run -n 2 -m package.module       a module instead of a file
  telegrad run -n 4 --restart 3 train.py    start a worker that dies again

All arguments after the script's name are passed to the script. Its standard input is empty. The environment
contains each worker's name and rank and the rendezvous address, so init_rpc() needs no arguments.

The exit code is 0 if every worker exited with 0. Otherwise it is the exit code of the worker that failed
first, or 128 + N if signal N killed it. Ctrl-C interrupts every worker. A second Ctrl-C kills them.

With --restart N, a worker that is killed or exits with a code other than 0 is started again: after 0.1
seconds, then after twice as long each time, up to 10 seconds. When it dies after N restarts within
--restart-window seconds, it has failed. TELEGRAD_RESTART is 0 at its first start, 1 at the next, and so on.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    options = _parser().parse_args(arguments)
    if options.command == "token":
        print(secrets.token_hex(32))
        return 0
    return _run(options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="telegrad", description="Autograd across machines: start workers, and create their shared secret."
    )
    parser.add_argument("--version", action="version", version=f"telegrad {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    run = commands.add_parser(
        "run",
        help="start a script as several workers on this machine",
        description="Start a script as several workers on this machine. When one fails, all are stopped, "
        "unless --restart or --keep-going says otherwise.",
        epilog=_RUN_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    run.add_argument("-n", "--workers", type=int, metavar="N", help="number of workers to start")
    run.add_argument("--names", metavar="A,B,C", help="names of the workers (default: worker0, worker1, ...)")
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
    run.add_argument("script", metavar="SCRIPT", help="the Python file to run")
    run.add_argument("arguments", metavar="...", nargs=argparse.REMAINDER, help="arguments for the script")
    commands.add_parser(
        "token",
        help="create a token for a group that spans machines",
        description="Print a new secret. Set TELEGRAD_TOKEN to it on every machine of the group, and keep it secret.",
    )
    return parser


def _run(options: argparse.Namespace) -> int:
    from telegrad.drop_in.subprocesses import install_in_subprocesses
    from telegrad.launch.local_rendezvous import device_shares
    from telegrad.launch.restarts import RestartPolicy
    from telegrad.launch.run import run

    try:
        names = _names(options)
        if not options.module and not os.path.exists(options.script):
            raise ValueError(f"file not found: {options.script!r}")
        if options.grace < 0:
            raise ValueError(f"--grace must be a number of seconds, at least 0, not {options.grace:g}")
        restarts = RestartPolicy(options.restart, options.restart_window)
        device_shares(len(names), options.devices_per_worker)  # raises if there are too few
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
        )
    except BrokenPipeError:
        # The reader of our output is gone, as in `telegrad run ... | head`. The workers have been stopped. Exit without
        # a message, and leave Python nothing that it could fail to flush.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def _names(options: argparse.Namespace) -> list[str]:
    from telegrad.launch.local_rendezvous import worker_names

    if options.names is None and options.workers is None:
        raise ValueError("specify the workers to start with -n N or --names A,B,C")
    if options.names is None:
        return worker_names(options.workers)
    names = worker_names(options.names.split(","))
    if options.workers not in (None, len(names)):
        raise ValueError(f"-n requests {options.workers} workers, but --names has {len(names)} names")
    return names


if __name__ == "__main__":
    sys.exit(main())
