"""What all commands share: how to find the group, and how to print tables and JSON."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from telegrad.errors import TelegradError
from telegrad.observe.attach import Attached, attach
from telegrad.observe.printable import one_line, printable

_C1 = re.compile("[\x7f-\x9f]")

_GAP = 2  # between columns


def add_group_options(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the options that say which group to look at, and how to print."""
    parser.add_argument(
        "--group", metavar="WORKER", help="the group of this worker (name or process id), if several run here"
    )
    parser.add_argument(
        "--address", metavar="tcp://HOST:PORT", help="a member on another machine; needs TELEGRAD_TOKEN"
    )
    parser.add_argument("--runtime-dir", metavar="DIR", help="where the sockets of the workers are, if not the default")
    parser.add_argument(
        "--timeout", type=float, default=3.0, metavar="SECONDS", help="time for the workers to answer (default: 3)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def look(options: argparse.Namespace, use: Callable[[Attached], int]) -> int:
    """Attach to the group, and return what `use` returns: the exit code. Errors are printed."""
    try:
        with attach(options.address, options.group, options.runtime_dir) as attached:
            return use(attached)
    except BrokenPipeError:  # of the output: the command ends without a message
        raise
    except (TelegradError, OSError) as error:
        print(f"telegrad {options.command}: {printable(str(error))}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def print_json(value: Any) -> None:
    """Print a view, or anything made of plain data."""
    text = msgspec.json.format(msgspec.json.encode(value), indent=2).decode()
    text = _C1.sub(lambda found: f"\\u{ord(found[0]):04x}", text)  # the other control characters are escaped already
    try:
        text.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:  # then with escapes
        text = json.dumps(json.loads(text), indent=2)
    print(text)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a plain table, numbers to the right.

    >>> print(table(["worker", "calls"], [["a", "7"], ["b", "12"]]))
    worker  calls
    a           7
    b          12
    """
    rows = [[one_line(cell) for cell in row] for row in rows]
    widths = [max(len(row[index]) for row in (head, *rows)) for index in range(len(head))]
    right = [index > 0 and all(_is_number(row[index]) for row in rows) for index in range(len(head))]
    lines = []
    for row in (head, *rows):
        cells = [
            cell.rjust(width) if to_right else cell.ljust(width)
            for cell, width, to_right in zip(row, widths, right, strict=True)
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def _is_number(cell: str) -> bool:
    return not cell or cell[0].isdigit() or cell == "-"


def print_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table: with rich on a terminal if that is installed, in as many parts as its width needs; else plain."""
    if sys.stdout.isatty():
        try:
            from rich.console import Console
        except ImportError:
            pass
        else:
            console = Console()
            for number, part in enumerate(rich_tables(head, rows, console.width)):
                console.print(*([""] if number else []), part, sep="\n")
            return
    print(table(head, rows))


def column_blocks(head: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> list[list[int]]:
    """Return which columns to show together, so that nothing is wider than a terminal. Each block has the first one.

    >>> column_blocks(["worker", "calls", "passes", "steps"], [["a", "7", "1", "2"]], 24)
    [[0, 1, 2], [0, 3]]
    """
    widths = [max(len(row[index]) for row in (head, *rows)) for index in range(len(head))]
    blocks: list[list[int]] = [[0]]
    used = widths[0]
    for index in range(1, len(head)):
        if len(blocks[-1]) > 1 and used + _GAP + widths[index] > width:
            blocks.append([0])
            used = widths[0]
        blocks[-1].append(index)
        used += _GAP + widths[index]
    return blocks


def rich_tables(head: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> list[Any]:
    """Return a table for rich's console, in as many parts as its width needs."""
    from rich.table import Table
    from rich.text import Text

    made = []
    for block in column_blocks(head, rows, width):
        part = Table(box=None, padding=(0, _GAP, 0, 0), pad_edge=False, header_style="bold")
        for index in block:
            numeric = index > 0 and all(_is_number(row[index]) for row in rows)
            style = "bold cyan" if index == 0 else ""
            part.add_column(head[index], justify="right" if numeric else "left", style=style, no_wrap=True)
        for row in rows:
            part.add_row(*(Text(one_line(row[index])) for index in block))  # a string would be read as markup
        made.append(part)
    return made


def size(count: float) -> str:
    """Return a number of bytes for people.

    >>> size(512), size(3 * 1024**2)
    ('512 B', '3.0 MiB')
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def duration(seconds: float) -> str:
    """Return a duration for people.

    >>> duration(0.5), duration(75), duration(7300)
    ('0.5 s', '1:15', '2:01:40')
    """
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
