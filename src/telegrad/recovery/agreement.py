"""Whether all workers of a training know the same group.

A worker hears of replacements when these introduce themselves to it. Of two workers that are replaced at about the same
time, each may introduce itself to the driver before it has found the other one. A step that began then would fail.
"""

from __future__ import annotations

from functools import partial

from telegrad.default_agent import default_agent
from telegrad.rpc.api import rpc_async
from telegrad.rpc.fan_out import run_on_all

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
