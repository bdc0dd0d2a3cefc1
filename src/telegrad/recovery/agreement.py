"""Whether all workers of a training know the same group.

A worker hears of replacements when these introduce themselves to it. Of two workers that are replaced at about the same
time, each may introduce itself to the driver before it has found the other one. A step that began then would fail.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

from telegrad.default_agent import default_agent
from telegrad.errors import RecoveryFailed
from telegrad.rpc.api import rpc_async
from telegrad.rpc.fan_out import run_on_all
from telegrad.waiting_report import WaitingReport
from telegrad.waiting_report import workers as named

_log = logging.getLogger("telegrad")

_ROUND = 2.0  # seconds that each worker waits to hear of others, before the driver looks again who is lost

Incarnations = dict[str, int]
"""All workers of a run, each in which incarnation."""


def unknown(workers: Incarnations, timeout: float) -> list[str]:
    """Return which of these workers this one does not hold for alive, having waited for them. Runs on each worker."""
    agent = default_agent()
    deadline = agent.runtime.now() + timeout
    members = agent.peers.members
    return [name for name, incarnation in workers.items() if not members.wait_for(name, deadline, incarnation)]


def unknown_to_others(workers: Incarnations, timeout: float) -> dict[str, list[str]]:
    """Return which workers do not know all these workers after `timeout` seconds, and whom not."""
    calls = [(name, partial(rpc_async, name, unknown, (workers, timeout), timeout=0)) for name in workers]
    found = run_on_all("asking who is in the group", calls)
    return {name: missing for name, missing in zip(workers, found, strict=True) if missing}


def all_agree(workers: Callable[[], Incarnations], lost: Callable[[], list[str]], timeout: float) -> bool:
    """Wait until all workers know the same group; False if another one is lost meanwhile. Runs on the driver."""
    agent = default_agent()
    runtime = agent.runtime
    deadline, report = runtime.now() + timeout, WaitingReport(runtime.now())
    while not lost():
        missing = unknown_to_others(workers(), _ROUND)
        if not missing:
            return True
        who, whom = next(iter(missing.items()))
        now = runtime.now()
        if now >= deadline:
            raise RecoveryFailed(
                f"worker {who!r} has lost {named(whom)}, which worker {agent.me.name!r} has not, and did not find it "
                f"again within {timeout:g} s: see that all workers can reach each other"
            )
        if report.is_due(now):
            _log.warning("the training waits until worker %r knows %s", who, named(whom))
    return False
