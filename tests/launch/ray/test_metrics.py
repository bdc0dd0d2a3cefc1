"""`telegrad.launch.ray.metrics` with counters that only remember what they were told."""

from __future__ import annotations

import os
from collections import Counter
from typing import Any

from telegrad.launch.ray.metrics import MetricsReporter
from telegrad.testing.group import local_group


class FakeMetrics:
    """Like `ray.util.metrics`: the values by name and tags."""

    def __init__(self) -> None:
        self.values: Counter[tuple[str, ...]] = Counter()
        values = self.values

        class Metric:
            def __init__(self, name: str, description: str, tag_keys: tuple[str, ...]) -> None:
                self.info = {"name": name, "tag_keys": tag_keys}

            def key(self, tags: dict[str, str]) -> tuple[str, ...]:
                return (self.info["name"], *(tags[key] for key in self.info["tag_keys"]))  # type: ignore[return-value]  # str

            def inc(self, value: float, tags: dict[str, str]) -> None:
                assert value > 0
                values[self.key(tags)] += value  # type: ignore[assignment]  # floats, too

            def set(self, value: float, tags: dict[str, str]) -> None:
                values[self.key(tags)] = value  # type: ignore[assignment]  # as above

        self.Counter: Any = Metric
        self.Gauge: Any = Metric


def test_counters_grow_by_what_is_new() -> None:
    metrics = FakeMetrics()
    with local_group(["a", "b"]) as agents:
        agent = agents["a"]
        reporter = MetricsReporter(agent, metrics)
        for calls in (3, 2):
            for _ in range(calls):
                agent.client.call("b", os.getpid, (), None, None)
            reporter._report()
        assert metrics.values["telegrad_calls_made", "a"] == 5
        sent, received = agent.peers.find("b").traffic()
        assert metrics.values["telegrad_bytes_sent", "a", "b"] == sent > 0
        assert metrics.values["telegrad_bytes_received", "a", "b"] == received > 0
        assert metrics.values["telegrad_workers_alive", "a"] == 2
        assert metrics.values["telegrad_workers_lost", "a"] == 0


def test_a_lost_worker_is_counted() -> None:
    metrics = FakeMetrics()
    with local_group(["a", "b"]) as agents:
        reporter = MetricsReporter(agents["a"], metrics)
        reporter._on_lost(None, "end of file")
        reporter._report()
    assert metrics.values["telegrad_workers_lost", "a"] == 1
