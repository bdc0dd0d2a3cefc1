"""Prometheus metrics of workers, made from their views.

prometheus-client is the extra ``telegrad[metrics]``, and is imported when metrics are made. `TABLE` lists every metric;
docs/metrics.md and the Grafana dashboard are checked against it.
"""

from __future__ import annotations

import importlib.util
import threading
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from telegrad.errors import TelegradError
from telegrad.observe.model import GroupView, Kind, WorkerView
from telegrad.observe.rates import live_calls, without_collectives

if TYPE_CHECKING:
    from prometheus_client.core import Metric

BUCKETS = (1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 2.5e-2, 5e-2, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
"""Upper bounds of durations, in seconds."""
DURATION = "telegrad_duration_seconds"
_TIMED = (Kind.CALL, Kind.SERVE, Kind.PASS, Kind.STEP, Kind.COLLECTIVE)

Labelled = Iterable[tuple[tuple[str, ...], float]]
"""Values of a metric, each with the values of its own labels."""


class Row(NamedTuple):
    """One metric."""

    name: str
    """Without the suffix ``_total`` that counters get."""
    kind: str
    """"counter" or "gauge"."""
    help: str
    values: Callable[[WorkerView], Labelled]
    labels: tuple[str, ...] = ()
    """Besides ``worker`` and ``host``."""


def _one(value: Callable[[WorkerView], float]) -> Callable[[WorkerView], Labelled]:
    return lambda view: [((), value(view))]


def _waits(view: WorkerView) -> Labelled:
    kinds = sorted({wait.kind for wait in view.waits})
    return [((kind,), sum(wait.kind == kind for wait in view.waits)) for kind in kinds]


def _oldest(view: WorkerView) -> float:
    return max((view.now - call.began for call in live_calls(view) if call.caller == view.name), default=0.0)


def _started(view: WorkerView) -> float:
    return view.wall - (view.now - view.started)


TABLE = (
    Row("telegrad_calls_made", "counter", "Calls that the worker made.", _one(lambda v: v.calls_made)),
    Row("telegrad_calls_served", "counter", "Calls that the worker served.", _one(lambda v: v.calls_served)),
    Row(
        "telegrad_calls_failed",
        "counter",
        "Calls of the worker that ended with an error.",
        _one(lambda v: v.calls_failed),
    ),
    Row("telegrad_sent_bytes", "counter", "Bytes sent to other workers.", _one(lambda v: v.bytes_sent)),
    Row("telegrad_received_bytes", "counter", "Bytes received from other workers.", _one(lambda v: v.bytes_received)),
    Row("telegrad_passes", "counter", "Backward passes that the worker took part in.", _one(lambda v: v.passes_run)),
    Row("telegrad_optimizer_steps", "counter", "Steps of optimizers on the worker.", _one(lambda v: v.optimizer_steps)),
    Row("telegrad_cpu_seconds", "counter", "Processor time of the process.", _one(lambda v: v.cpu_seconds)),
    Row("telegrad_resident_memory_bytes", "gauge", "Resident memory of the process.", _one(lambda v: v.memory)),
    Row("telegrad_shared_memory_bytes", "gauge", "Shared memory for large messages.", _one(lambda v: v.shared_memory)),
    Row("telegrad_threads", "gauge", "Threads of the process.", _one(lambda v: v.threads)),
    Row("telegrad_open_descriptors", "gauge", "Open file descriptors of the process.", _one(lambda v: v.descriptors)),
    Row(
        "telegrad_live_calls",
        "gauge",
        "Calls that have not ended.",
        lambda v: [(("made",), len(without_collectives(v.made))), (("served",), len(without_collectives(v.served)))],
        ("direction",),
    ),
    Row("telegrad_oldest_call_seconds", "gauge", "Age of the oldest call that the worker waits for.", _one(_oldest)),
    Row("telegrad_running_passes", "gauge", "Backward passes that run.", _one(lambda v: len(v.passes))),
    Row("telegrad_contexts", "gauge", "Autograd contexts that exist.", _one(lambda v: v.contexts_alive)),
    Row(
        "telegrad_references",
        "gauge",
        "RRefs that the worker owns or holds.",
        lambda v: [(("owned",), v.references_owned), (("held",), v.references_held)],
        ("kind",),
    ),
    Row("telegrad_waits", "gauge", "What threads of the worker wait for.", _waits, ("kind",)),
    Row("telegrad_generation", "gauge", "Grows when the worker is replaced.", _one(lambda v: v.generation)),
    Row("telegrad_start_time_seconds", "gauge", "When the worker started, in Unix time.", _one(_started)),
)

UP = ("telegrad_up", "Whether the worker answered.")
DROPPED = ("telegrad_dropped_events", "Events that were dropped before they could be counted in durations.")


def names() -> set[str]:
    """Return the names under which Prometheus sees the metrics."""
    found = {row.name + ("_total" if row.kind == "counter" else "") for row in TABLE}
    histogram = {f"{DURATION}_{suffix}" for suffix in ("bucket", "count", "sum")}
    return found | histogram | {UP[0], f"{DROPPED[0]}_total"}


def check_installed(find: Callable[[str], object] = importlib.util.find_spec) -> None:
    """Raise an error that names the extra if prometheus-client is missing."""
    if find("prometheus_client") is None:
        raise TelegradError(
            "metrics need prometheus-client, which this Python does not have: "
            "install it with `pip install 'telegrad[metrics]'`"
        )


class Durations:
    """Histograms of how long things took on each worker, from their events."""

    def __init__(self) -> None:
        self.counts: dict[tuple[str, str, str, str], list[int]] = {}
        """By worker, host, kind and outcome ("ok" or "error"): how many are in each bucket. The last has no bound."""
        self.sums: dict[tuple[str, str, str, str], float] = {}
        self.dropped: dict[tuple[str, str], int] = {}

    def add(self, views: Iterable[WorkerView]) -> None:
        """Count the events of these views. Each event must be given once."""
        for view in views:
            host = (view.name, view.host)
            self.dropped[host] = self.dropped.get(host, 0) + view.dropped
            for event in view.events:
                if event.kind in _TIMED:
                    key = (*host, str(event.kind), "error" if event.outcome else "ok")
                    seconds = max(0.0, event.ended - event.began)
                    self.counts.setdefault(key, [0] * (len(BUCKETS) + 1))[bisect_left(BUCKETS, seconds)] += 1
                    self.sums[key] = self.sums.get(key, 0.0) + seconds


def families(
    views: Sequence[WorkerView], silent: Iterable[str] = (), durations: Durations | None = None
) -> Iterator[Metric]:
    """Yield the metrics of workers, for Prometheus."""
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    kinds: dict[str, Any] = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily}
    for row in TABLE:
        family = kinds[row.kind](row.name, row.help, labels=("worker", "host", *row.labels))
        for view in views:
            for labels, value in row.values(view):
                family.add_metric((view.name, view.host, *labels), value)
        yield family
    up = GaugeMetricFamily(*UP, labels=("worker",))
    for name, value in [*((view.name, 1.0) for view in views), *((name, 0.0) for name in silent)]:
        up.add_metric((name,), value)
    yield up
    if durations is not None:
        yield from _histograms(durations)


def _histograms(durations: Durations) -> Iterator[Metric]:
    from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily

    labels = ("worker", "host", "kind", "outcome")
    family = HistogramMetricFamily(DURATION, "How long calls, passes and steps took.", labels=labels)
    for key, counts in durations.counts.items():
        buckets, total = [], 0
        for bound, number in zip((*map(str, BUCKETS), "+Inf"), counts, strict=True):
            total += number
            buckets.append((bound, float(total)))
        family.add_metric(key, buckets, durations.sums[key])
    yield family
    dropped = CounterMetricFamily(*DROPPED, labels=("worker", "host"))
    for host, number in durations.dropped.items():
        dropped.add_metric(host, number)
    yield dropped


class GroupMetrics:
    """The metrics of a group, from one view of it after the other."""

    def __init__(self) -> None:
        check_installed()
        self._lock = threading.Lock()  # protects _durations
        self._durations = Durations()

    def add(self, view: GroupView) -> None:
        """Count the events of a view."""
        with self._lock:
            self._durations.add(view.workers)

    def render(self, view: GroupView) -> tuple[bytes, str]:
        """Return the metrics as text, and its content type."""
        with self._lock:
            found = list(families(view.workers, view.silent, self._durations))
        return render(found)


def render(metrics: Iterable[Metric]) -> tuple[bytes, str]:
    """Return metrics in Prometheus's text format, and its content type."""
    from prometheus_client import CollectorRegistry
    from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
    from prometheus_client.registry import Collector

    found = list(metrics)

    class _Once(Collector):
        def collect(self) -> list[Metric]:
            return found

    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Once())
    return generate_latest(registry), CONTENT_TYPE_LATEST
