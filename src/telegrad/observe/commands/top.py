"""``telegrad top``: the live view of a group, refreshed every second."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from typing import Any

from telegrad.observe.attach import Attached
from telegrad.observe.attach_protocol import AttachRequest
from telegrad.observe.commands.common import (
    add_group_options,
    column_blocks,
    duration,
    look,
    print_json,
    rich_tables,
    size,
    table,
)
from telegrad.observe.model import CallKey, GroupView, ViewRequest
from telegrad.observe.printable import one_line
from telegrad.observe.rates import WorkerRow, live_calls, rows

HEAD = (
    *("worker", "calls/s", "in flight", "oldest", "sent/s", "received/s", "memory", "shared", "cpu", "threads"),
    *("contexts", "passes now/ever", "refs own/held", "steps"),
)
_CALLS = ("age", "call", "caller", "callee", "function", "state", "at")
_MOST_CALLS = 15


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Add the command."""
    parser = commands.add_parser(
        "top",
        help="watch a running group",
        description="Watch a running group: its workers and the oldest calls. Ctrl-C ends it.",
    )
    parser.add_argument("--interval", type=float, default=1.0, metavar="SECONDS", help="between looks (default: 1)")
    parser.add_argument("--count", type=int, default=0, metavar="N", help="end after so many looks (default: never)")
    return add_group_options(parser)


def run(options: argparse.Namespace) -> int:
    """Show the group until interrupted."""

    def show(attached: Attached) -> int:
        if not options.json and sys.stdout.isatty():
            try:
                from rich.live import Live
            except ImportError:
                pass
            else:
                with Live(screen=True, auto_refresh=False) as live:
                    console = live.console

                    def draw(group: GroupView, before: GroupView | None) -> None:
                        live.update(_rich(group, before, (console.width, console.height)), refresh=True)

                    _watch(attached, options, draw)
                return 0
        _watch(attached, options, _print_json if options.json else _print)
        return 0

    return look(options, show)


def _watch(
    attached: Attached, options: argparse.Namespace, show: Callable[[GroupView, GroupView | None], None]
) -> None:
    before, number = None, 0
    while True:
        group = attached.look(AttachRequest(ViewRequest(contexts=False), timeout=options.timeout))
        show(group, before)
        before, number = group, number + 1
        if options.count and number >= options.count:
            return
        time.sleep(max(0.05, options.interval))


def _print_json(group: GroupView, before: GroupView | None) -> None:
    print_json({"workers": rows(group, before), "calls": calls(group), "silent": group.silent})


def _print(group: GroupView, before: GroupView | None) -> None:
    print(table(HEAD, [cells(row) for row in rows(group, before)]))
    if found := calls(group):
        print()
        print(table(_CALLS, found))
    for name, reason in group.silent.items():
        print(one_line(f"{name}: silent, {reason}"))
    print(flush=True)


def _rich(group: GroupView, before: GroupView | None, terminal: tuple[int, int]) -> Any:
    """Return what a terminal of this width and height shows."""
    from rich.console import Group
    from rich.text import Text

    width, height = terminal
    workers, oldest = [cells(row) for row in rows(group, before)], calls(group)
    blocks = len(column_blocks(HEAD, workers, width))
    # A title, a line between parts, and the heads of the tables; the rest is for workers, and at least 3 for calls.
    for_workers = max(1, (height - 3 - 2 * blocks - (3 + min(3, len(oldest)) if oldest else 0)) // blocks)
    hidden = len(workers) - for_workers
    title = f"telegrad top: {len(group.workers)} workers, {time.strftime('%H:%M:%S')}"
    title += f" ({hidden} not shown)" if hidden > 0 else ""
    parts: list[Any] = [Text(title, style="bold")]
    for part in rich_tables(HEAD, workers[:for_workers], width):
        parts += ["", part]
    left = height - 3 - blocks * (2 + min(len(workers), for_workers)) - 3 - len(group.silent)
    if oldest:
        parts += ["", Text("Oldest calls", style="bold"), *rich_tables(_CALLS, oldest[: max(1, left)], 10**6)]
    silent = [one_line(f"{name}: silent, {reason}") for name, reason in group.silent.items()]
    parts += [Text(each, style="bold red") for each in silent]
    return Group(*parts)


def cells(row: WorkerRow) -> list[str]:
    """Return a row of the table of workers."""
    return [
        row.worker,
        f"{row.calls_per_second:.0f}",
        str(row.in_flight),
        duration(row.oldest) if row.in_flight else "-",
        size(row.sent_per_second),
        size(row.received_per_second),
        size(row.memory),
        size(row.shared_memory),
        f"{row.cpu:.0%}",
        str(row.threads),
        str(row.contexts),
        f"{row.passes}/{row.passes_run}",
        f"{row.references_owned}/{row.references_held}",
        str(row.optimizer_steps),
    ]


def calls(group: GroupView) -> list[list[str]]:
    """Return rows of the oldest calls, as their callees see them, or else their callers."""
    found: dict[CallKey, tuple[float, list[str]]] = {}
    for view in group.workers:
        for call in live_calls(view):
            age = view.now - call.began
            row = [duration(age), str(call.id), call.caller, call.callee, call.function, call.state, _short(call.where)]
            if (call.caller, call.id) not in found or call.callee == view.name:
                found[call.caller, call.id] = age, row
    return [row for _, row in sorted(found.values(), key=lambda each: -each[0])[:_MOST_CALLS]]


def _short(where: str) -> str:
    """Return a place without the folders of its file.

    >>> _short("/home/me/train.py:17 in step")
    'train.py:17 in step'
    """
    place, found, function = where.partition(" in ")
    return place.rpartition("/")[2] + found + function
