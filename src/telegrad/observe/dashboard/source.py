"""Where the dashboard gets its views from: a group, looked at from a member or from outside.

The clocks of workers are compared with each look, and each comparison is a little wrong. The best of the last minute is
kept, so that spans do not jump.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Self

import msgspec

from telegrad.errors import TelegradError
from telegrad.observe.attach import Attached
from telegrad.observe.attach_protocol import AttachRequest
from telegrad.observe.dashboard.stuck_tree import StuckTree, stuck_tree
from telegrad.observe.model import EventPosition, GroupView, ViewRequest
from telegrad.observe.stuck import analyze

MOST_EVENTS = 10_000
"""Events that a worker tells with one look."""
KEPT = 60.0
"""Seconds for which a comparison of clocks counts."""

Gather = Callable[..., GroupView]
"""As `telegrad.observe.gather.gather` without its first argument."""


class Source:
    """Looks at a group for the dashboard."""

    def __init__(self, gather: Gather, older: float = 5.0) -> None:
        self._gather = gather
        self._older = older
        self._stacks = False
        self._clocks: dict[str, tuple[float, float, float]] = {}  # error, when, offset

    def look(self, since: Mapping[str, EventPosition]) -> GroupView:
        """Return a view with the events from these numbers on. Stacks are asked for while something is stuck."""
        options: dict[str, Any] = {"clocks": not self._clocks}
        request = ViewRequest(stacks=self._stacks, events_since=0, most_events=MOST_EVENTS)
        return self._steady(self._gather(request, since=since, **options))

    def stuck(self, view: GroupView) -> StuckTree:
        """Return what is stuck in a view."""
        report = analyze(view, self._older)
        self._stacks = bool(report.roots)
        return stuck_tree(report)

    def _steady(self, view: GroupView) -> GroupView:
        """Return the view with the best known offsets."""
        for name, offset in view.offsets.items():
            new = view.errors.get(name, 0.0), view.now, offset
            error, when, old = self._clocks.get(name, new)
            # A process that was replaced may run on another host, whose clock has nothing to do with the one before.
            if new[0] <= error or view.now - when > KEPT or abs(old - offset) > error + new[0]:
                self._clocks[name] = new
        clocks = {name: self._clocks[name] for name in view.offsets}
        for workers in _by_host(view):
            best = min((clocks[name] for name in workers if name in clocks), default=None)
            for name in workers:
                # All processes of a host have one clock. Two hosts may have one name, but hardly one clock.
                if best is not None and name in clocks and abs(clocks[name][2] - best[2]) <= clocks[name][0] + best[0]:
                    clocks[name] = best
        return msgspec.structs.replace(
            view,
            offsets={name: offset for name, (_, _, offset) in clocks.items()},
            errors={name: error for name, (error, _, _) in clocks.items()},
        )


def _by_host(view: GroupView) -> list[list[str]]:
    hosts: dict[str, list[str]] = {}
    for worker in view.workers:
        hosts.setdefault(worker.host, []).append(worker.name)
    return list(hosts.values())


class AttachedSource(Source):
    """Looks at a group from outside. If the worker that it is attached to ends, it attaches to another one."""

    def __init__(self, attach: Callable[[], Attached], older: float = 5.0, timeout: float = 3.0) -> None:
        super().__init__(self._ask, older)
        self._attach = attach
        self._timeout = timeout
        self._attached: Attached | None = attach()  # at once, so that a mistake in the options is an error

    def _ask(self, request: ViewRequest, *, since: Mapping[str, EventPosition], clocks: bool) -> GroupView:
        attached = self._attached
        if attached is None:
            attached = self._attached = self._attach()
        try:
            return attached.look(AttachRequest(request, dict(since), self._timeout, clocks))
        except (TelegradError, OSError):
            self._attached = None
            attached.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._attached is not None:
            self._attached.close()
