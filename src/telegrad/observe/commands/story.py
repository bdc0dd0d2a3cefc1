"""``telegrad story``: who sent what to whom, in order, in a context or because of a call."""

from __future__ import annotations

import argparse
import sys

from telegrad.observe.attach import Attached
from telegrad.observe.attach_protocol import AttachRequest
from telegrad.observe.commands.common import add_group_options, look, print_json
from telegrad.observe.model import CallKey, ViewRequest
from telegrad.observe.story import latest, render, story_of_call, story_of_context


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Add the command."""
    parser = commands.add_parser(
        "story",
        help="tell what happened in a context, or because of a call",
        description="Tell who sent what to whom, in order, as far as the workers remember it.",
    )
    parser.add_argument(
        "what",
        metavar="CONTEXT|CALL",
        nargs="?",
        help="the id of a context, or CALLER:NUMBER of a call (default: list the latest ones)",
    )
    return add_group_options(parser)


def parse(text: str) -> int | CallKey:
    """Return the context, or the caller and number of the call.

    >>> parse("0x1f"), parse("worker0:7")
    (31, ('worker0', 7))
    """
    caller, colon, number = text.rpartition(":")
    if colon:
        return caller, int(number)
    return int(text, 0)


def run(options: argparse.Namespace) -> int:
    """Tell the story. The exit code is 0 if anything is known, else 1."""
    try:
        what = None if options.what is None else parse(options.what)
    except ValueError:
        print(f"telegrad story: {options.what!r} is neither a context nor CALLER:NUMBER", file=sys.stderr)
        return 2

    def show(attached: Attached) -> int:
        view = ViewRequest(events_since=0)
        group = attached.look(AttachRequest(view, timeout=options.timeout, clocks=True))
        if what is None:
            lines = latest(group)
        elif isinstance(what, int):
            lines = story_of_context(group, what)
        else:
            lines = story_of_call(group, what)
        if options.json:
            print_json(lines)
        elif what is None:
            print(render(lines) if lines else "Nothing has happened yet: no call was made, and no context entered.")
            print("\nTell of one with `telegrad story CONTEXT`, or `telegrad story CALLER:NUMBER`.")
        else:
            print(render(lines))
        return 0 if lines else 1

    return look(options, show)
