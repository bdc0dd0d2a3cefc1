"""Reports a worker's calls, bytes and losses as Ray metrics, for Ray's dashboard and Prometheus.

A timer of the agent reads the agent's own counters every `INTERVAL` seconds, as often as Ray collects metrics. So a
call costs nothing more. Without Ray's metrics agent (it is part of ``ray[default]``), nothing is reported.

| metric | kind | what |
| --- | --- | --- |
| `telegrad_calls_made` | counter | calls that this worker has made |
| `telegrad_bytes_sent`, `telegrad_bytes_received` | counters | bytes of messages, by `peer` |
| `telegrad_workers_lost` | counter | workers that this one has lost |
| `telegrad_workers_alive` | gauge | workers of the group that this one holds for alive, itself included |

All have the tag `worker`, the name of the worker that reports.
"""

from __future__ import annotations

import threading
from typing import Any, Protocol

from telegrad.agent.agent import Agent
from telegrad.protocol.membership import State

INTERVAL = 10.0


class Metrics(Protocol):
    """The module `ray.util.metrics`, or something like it."""

    Counter: Any
    Gauge: Any


def has_metrics_agent() -> bool:
    """Return whether this Ray node has an agent that collects metrics."""
    import ray

    mine = ray.get_runtime_context().get_node_id()
    return any(node["NodeID"] == mine and node.get("MetricsExportPort", -1) > 0 for node in ray.nodes())


def report_metrics(agent: Agent) -> None:
    """Report the metrics of an agent as long as it lives, if somebody collects them."""
    if has_metrics_agent():
        from ray.util import metrics

        MetricsReporter(agent, metrics)


class MetricsReporter:
    """The metrics of one agent. It needs no end: its timer is the agent's."""

    def __init__(self, agent: Agent, metrics: Metrics) -> None:
        worker = ("worker",)
        self._agent = agent
        self._calls = metrics.Counter("telegrad_calls_made", "Calls that the worker has made.", worker)
        self._sent = metrics.Counter("telegrad_bytes_sent", "Bytes of messages to a worker.", (*worker, "peer"))
        self._received = metrics.Counter("telegrad_bytes_received", "Bytes of messages of a worker.", (*worker, "peer"))
        self._lost = metrics.Counter("telegrad_workers_lost", "Workers that the worker has lost.", worker)
        self._alive = metrics.Gauge("telegrad_workers_alive", "Workers of the group that are alive.", worker)
        self._reported: dict[tuple[str, str], int] = {}
        self._lock = threading.Lock()  # protects _losses
        self._losses = 0
        agent.peers.members.on_lost(self._on_lost)
        self._report()

    def _on_lost(self, member: object, reason: str) -> None:
        with self._lock:
            self._losses += 1

    def _report(self) -> None:
        agent = self._agent
        if agent.closed:
            return
        tags = {"worker": agent.me.name}
        self._count(self._calls, agent.client.made, tags)
        self._count(self._lost, self._losses, tags)
        for peer in agent.peers.all():
            sent, received = peer.traffic()
            self._count(self._sent, sent, {**tags, "peer": peer.record.name})
            self._count(self._received, received, {**tags, "peer": peer.record.name})
        members = agent.peers.members.all()
        self._alive.set(sum(member.state is State.ALIVE for member in members), tags)
        agent.executor.timers.at(agent.runtime.now() + INTERVAL, self._report)

    def _count(self, counter: Any, total: int, tags: dict[str, str]) -> None:
        """Add what is new since the last report. The count of a peer begins anew when the peer was replaced."""
        key = counter.info["name"], tags.get("peer", "")
        before = self._reported.get(key, 0)
        self._reported[key] = total
        if total != before:
            counter.inc(total - before if total > before else total, tags)
