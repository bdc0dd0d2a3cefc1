"""The `telegrad` command, for people who start workers from a shell.

Torch takes seconds to load, so it is loaded only by the commands that need it.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import secrets
import sys
from collections.abc import Sequence

_RUN_EXAMPLES = """\
examples:
  telegrad run -n 4 train.py --epochs 3     four workers: worker0 to worker3
  telegrad run --names ps,trainer0 main.py  two workers with names of their own
  telegrad run -n 2 -m package.module       a module instead of a file

Everything after the script's name goes to the script. Its standard input is empty. Each worker finds its
name, its rank and the meeting place of the group in the environment, so init_rpc() needs no argument.

The exit code is 0 if every worker ended with 0. Otherwise it is that of the worker that failed first, or 128
and the number of the signal that killed it. Ctrl-C goes to every worker; a second one kills them at once.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what the command line asks, and return the exit code."""
    options = _parser().parse_args(arguments)
    if options.command == "token":
        print(secrets.token_hex(32))
        return 0
    return _run(options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="telegrad", description="Autograd across machines: start workers, and let them trust each other."
    )
    parser.add_argument("--version", action="version", version=f"telegrad {importlib.metadata.version('telegrad')}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    run = commands.add_parser(
        "run",
        help="start a script as several workers on this machine",
        description="Start a script as several workers on this machine. When one fails, all are stopped.",
        epilog=_RUN_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    run.add_argument("-n", "--workers", type=int, metavar="N", help="how many workers to start")
    run.add_argument("--names", metavar="A,B,C", help="the workers' names, instead of worker0, worker1 and so on")
    run.add_argument("-m", "--module", action="store_true", help="SCRIPT is the name of a module, as in python -m")
    run.add_argument(
        "--no-prefix", action="store_true", help="let the workers write to this terminal themselves, without names"
    )
    run.add_argument(
        "--grace",
        type=float,
        default=5.0,
        metavar="SECONDS",
        help="how long a worker that is told to stop may take before it is killed (default: 5)",
    )
    run.add_argument(
        "--drop-in",
        action="store_true",
        help="let telegrad stand in for torch.distributed.rpc and its kin in the script",
    )
    run.add_argument("script", metavar="SCRIPT", help="the Python file to run")
    run.add_argument("arguments", metavar="...", nargs=argparse.REMAINDER, help="arguments for the script")
    commands.add_parser(
        "token",
        help="make a token for a group that spans machines",
        description="Print a fresh secret. Put it into TELEGRAD_TOKEN on every machine of the group, and nowhere else.",
    )
    return parser


def _run(options: argparse.Namespace) -> int:
    from telegrad.drop_in.children import inherit
    from telegrad.launch.run import run

    try:
        names = _names(options)
        if not options.module and not os.path.exists(options.script):
            raise ValueError(f"there is no file {options.script!r}")
        if options.grace < 0:
            raise ValueError(f"--grace is a number of seconds, at least 0, and not {options.grace:g}")
    except ValueError as error:
        print(f"telegrad run: {error}", file=sys.stderr)
        return 2
    if options.drop_in:
        inherit()
    command = ["-m", options.script] if options.module else [options.script]
    try:
        return run([*command, *options.arguments], names, prefix=not options.no_prefix, grace=options.grace)
    except BrokenPipeError:
        # Who read our output has gone, as in `telegrad run ... | head`. The workers have been ended; say nothing,
        # and leave Python nothing that it could fail to flush.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def _names(options: argparse.Namespace) -> list[str]:
    from telegrad.launch.meeting import worker_names

    if options.names is None and options.workers is None:
        raise ValueError("say how many workers to start, with -n N or with --names A,B,C")
    if options.names is None:
        return worker_names(options.workers)
    names = worker_names(options.names.split(","))
    if options.workers not in (None, len(names)):
        raise ValueError(f"-n asks for {options.workers} workers, but --names has {len(names)} names")
    return names


if __name__ == "__main__":
    sys.exit(main())
