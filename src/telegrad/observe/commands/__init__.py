"""The commands that look at a running group. Each module has `add_parser` and `run`."""

from __future__ import annotations

import argparse
from importlib import import_module

NAMES = ("status", "stuck", "top", "trace", "graph", "story", "dashboard")
"""The modules, in the order in which ``telegrad --help`` lists them."""


def add_parsers(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add all commands. Each parser has its function as the default of ``run``."""
    for name in NAMES:
        module = import_module(f"{__name__}.{name}")
        module.add_parser(commands).set_defaults(run=module.run)
