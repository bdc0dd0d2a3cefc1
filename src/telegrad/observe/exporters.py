"""Starts what the options of a worker export to other systems: Prometheus metrics, and OpenTelemetry spans.

Nothing of either is imported unless the options or the environment ask for it.
"""

from __future__ import annotations

from telegrad.agent.agent import Agent
from telegrad.options import Options


def prepare(agent: Agent, options: Options) -> None:
    """Check what is asked for before the worker joins, and make spans from its first call on."""
    if options.uses_otel():
        from telegrad.observe.otel import instrument

        instrument(agent)
    if address := options.metrics_address():
        from telegrad.observe.metrics import check_installed
        from telegrad.observe.metrics_server import parse_metrics_address

        check_installed()
        parse_metrics_address(address)


def serve(agent: Agent, options: Options) -> None:
    """Serve the metrics of a worker that has joined."""
    if address := options.metrics_address():
        from telegrad.observe.metrics_server import serve_metrics

        serve_metrics(agent, address)
