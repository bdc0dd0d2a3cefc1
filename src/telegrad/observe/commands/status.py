"""``telegrad status``: the workers of a running group, and what each has done and holds."""

from __future__ import annotations

import argparse
import time

from telegrad.observe.attach import Attached
from telegrad.observe.attach_protocol import AttachRequest
from telegrad.observe.commands.common import add_group_options, duration, look, print_json, print_table, size
from telegrad.observe.model import ViewRequest
from telegrad.observe.printable import one_line
from telegrad.observe.rates import RESTARTS, WorkerRow, rows

HEAD = (
    *("worker", "up", "calls/s", "made", "served", "failed", "in flight", "sent", "received", "memory", "contexts"),
    *("passes now/ever", "refs own/held", "steps"),
)


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Add the command."""
    parser = commands.add_parser(
        "status",
        help="show the workers of a running group",
        description="Show the workers of a running group: calls, traffic, memory, contexts, passes and references.",
    )
    parser.add_argument(
        "--interval", type=float, default=0.5, metavar="SECONDS", help="time over which rates are taken (default: 0.5)"
    )
    return add_group_options(parser)


def run(options: argparse.Namespace) -> int:
    """Show the group once. The exit code is 0 if all workers answered, else 3."""

    def show(attached: Attached) -> int:
        request = AttachRequest(ViewRequest(contexts=options.json), timeout=options.timeout)
        before = attached.look(request)
        time.sleep(max(0.0, options.interval))
        group = attached.look(request)
        found = rows(group, before)
        if options.json:
            print_json({"workers": found, "silent": group.silent, "view": group})
            return 3 if group.silent else 0
        print_table(HEAD, [cells(row) for row in found])
        print()
        for row in found:
            about = (
                f"{row.worker}: id {row.id}, pid {row.pid} on {row.host}, incarnation {row.incarnation:x}"
                f"{_generation(row.generation)}, {', '.join(row.addresses)}"
            )
            print(one_line(about))
        for name, reason in group.silent.items():
            print(one_line(f"{name}: silent, {reason}"))
        return 3 if group.silent else 0

    return look(options, show)


def _generation(number: int) -> str:
    """Say how often a worker was replaced. A launcher leaves room between the generations that it gives.

    >>> _generation(0), _generation(2), _generation(3 * RESTARTS)
    ('', ', generation 2', ', restart 3')
    """
    if number >= RESTARTS:
        return f", restart {number // RESTARTS}"
    return f", generation {number}" if number else ""


def cells(row: WorkerRow) -> list[str]:
    """Return a row of the table."""
    return [
        row.worker,
        duration(row.up),
        f"{row.calls_per_second:.0f}",
        str(row.calls_made),
        str(row.calls_served),
        str(row.calls_failed),
        str(row.in_flight),
        size(row.sent),
        size(row.received),
        size(row.memory),
        str(row.contexts),
        f"{row.passes}/{row.passes_run}",
        f"{row.references_owned}/{row.references_held}",
        str(row.optimizer_steps),
    ]
