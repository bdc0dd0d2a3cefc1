from __future__ import annotations

import operator
from collections.abc import Iterator

import pytest

from telegrad.agent.agent import Agent
from telegrad.observe import exporters
from telegrad.observe.metrics_server import MetricsListener
from telegrad.observe.otel import Tracing
from telegrad.options import Options
from telegrad.testing.group import local_group


@pytest.fixture
def agent(monkeypatch: pytest.MonkeyPatch) -> Iterator[Agent]:
    for name in ("TELEGRAD_METRICS", "TELEGRAD_OTEL"):
        monkeypatch.delenv(name, raising=False)
    with local_group(["a"]) as agents:
        yield agents["a"]


def start(agent: Agent, options: Options) -> tuple[bool, bool]:
    """Start what the options ask for, and return whether there are metrics, and whether spans."""
    exporters.prepare(agent, options)
    exporters.serve(agent, options)
    listens = any(isinstance(each, MetricsListener) for each in agent.listeners)
    return listens, any(isinstance(each, Tracing) for each in agent.pipeline.concerned[0])


def test_nothing_is_exported_by_default(agent: Agent) -> None:
    assert start(agent, Options()) == (False, False)


def test_options_switch_both_on(agent: Agent) -> None:
    assert start(agent, Options(metrics="0", otel=True)) == (True, True)
    assert agent.call("a", operator.add, (1, 2)) == 3


def test_so_does_the_environment(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TELEGRAD_METRICS", "0")
    monkeypatch.setenv("TELEGRAD_OTEL", "1")
    assert start(agent, Options()) == (True, True)


def test_mistakes_are_found_before_the_worker_joins(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="PORT or HOST:PORT"):
        exporters.prepare(agent, Options(metrics="here"))
    monkeypatch.setenv("TELEGRAD_OTEL", "yes")
    with pytest.raises(ValueError, match="set it to 1"):
        exporters.prepare(agent, Options())
