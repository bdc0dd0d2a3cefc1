"""What a group is doing, and where the time goes: one stream of events per worker, and what reads it.

Everything here reads the views of `telegrad.observe.model`. The functions below look from the agent of this process;
`telegrad.observe.attach` looks from a process that is not a member.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from telegrad.observe.model import GroupView
    from telegrad.observe.profiling.group import GroupProfile, profile, serve_profiles

__all__ = ["GroupProfile", "dump", "profile", "report", "serve_profiles", "view"]

_MODULES = ("attach", "otel", "record_trace")


def __getattr__(name: str) -> Any:
    if name in ("GroupProfile", "profile", "serve_profiles"):  # commands do not need torch
        return getattr(import_module("telegrad.observe.profiling.group"), name)
    if name in _MODULES:  # as the docs write them, without an import of their own
        return import_module(f"telegrad.observe.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name, obj=sys.modules[__name__])


def __dir__() -> list[str]:
    return sorted({*__all__, *_MODULES, *(name for name in globals() if name.startswith("__"))})


def view(*, stacks: bool = False, events: bool = False, timeout: float = 3.0) -> GroupView:
    """Return what can be seen of the group from this worker, with stacks and recorded events if wanted.

    Workers that do not answer within `timeout` seconds are in `GroupView.silent`.
    """
    from telegrad.default_agent import default_agent  # imported here, because commands do not need torch
    from telegrad.observe.gather import gather
    from telegrad.observe.model import ViewRequest

    request = ViewRequest(stacks=stacks, events_since=0 if events else -1)
    return gather(default_agent(), request, timeout=timeout, clocks=events)


def report(older: float = 1.0, *, timeout: float = 3.0) -> str:
    """Return what has been running for more than `older` seconds, and what it waits for, as text."""
    from telegrad.observe.stuck import analyze
    from telegrad.observe.stuck_text import render

    return render(analyze(view(stacks=True, timeout=timeout), older))


def dump(file: TextIO | None = None, *, older: float = 0.0, timeout: float = 3.0) -> None:
    """Write all calls and passes that are in progress, with stacks and what they wait for, to `file` (default: stderr).

    The signal SIGUSR1 does the same, if the program has no handler for it.
    """
    print(report(older, timeout=timeout), file=sys.stderr if file is None else file, flush=True)
