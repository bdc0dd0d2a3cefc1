"""``telegrad stuck``: what has been running for long, where, and what it waits for."""

from __future__ import annotations

import argparse

from telegrad.observe.attach import Attached
from telegrad.observe.attach_protocol import AttachRequest
from telegrad.observe.commands.common import add_group_options, look, print_json
from telegrad.observe.model import ViewRequest
from telegrad.observe.stuck import analyze
from telegrad.observe.stuck_text import render


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Add the command."""
    parser = commands.add_parser(
        "stuck",
        help="show calls and passes that do not end, and what they wait for",
        description="Show every call and backward pass that is older than N seconds, as a tree over the workers, with "
        "the stack of its thread and what it waits for. Calls that wait for each other are named first.",
    )
    parser.add_argument(
        "--older", type=float, default=1.0, metavar="N", help="only what is older than so many seconds (default: 1)"
    )
    parser.add_argument("--no-stacks", action="store_true", help="leave out the Python stacks")
    return add_group_options(parser)


def run(options: argparse.Namespace) -> int:
    """Show what is stuck. The exit code is 0 if there is no wait cycle, else 4."""

    def show(attached: Attached) -> int:
        view = ViewRequest(stacks=True, contexts=False)
        report = analyze(attached.look(AttachRequest(view, timeout=options.timeout)), options.older)
        if options.json:
            print_json(report)
        else:
            print(render(report, stacks=not options.no_stacks))
        return 4 if report.cycles else 0

    return look(options, show)
