from __future__ import annotations

import json
import re

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.support.paths import ROOT
from tests.support.synthetic_group import SyntheticGroup

from telegrad.errors import TelegradError
from telegrad.observe import metrics
from telegrad.observe.metrics import Durations, GroupMetrics
from telegrad.observe.model import Event, GroupView, Kind, LiveCall, Wait, WorkerView


def worker(*events: Event, **fields: object) -> WorkerView:
    return WorkerView("a", 0, 1, 0, "host", 1, (), 100.0, 1000.0, 40.0, events=events, **fields)  # type: ignore[arg-type]


def samples(view: GroupView) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    made = GroupMetrics()
    made.add(view)
    text, kind = made.render(view)
    assert kind.startswith("text/plain")
    found = {}
    for family in text_string_to_metric_families(text.decode()):
        for sample in family.samples:
            found[sample.name, tuple(sorted(sample.labels.items()))] = sample.value
    return found


def test_values_come_from_the_views() -> None:
    view = GroupView((worker(calls_made=7, memory=1 << 20, waits=(Wait("gate", ("b",), 1.0, "x"),)),), {"b": "lost"})
    found = samples(view)
    here = (("host", "host"), ("worker", "a"))
    assert found["telegrad_calls_made_total", here] == 7
    assert found["telegrad_resident_memory_bytes", here] == 1 << 20
    assert found["telegrad_start_time_seconds", here] == 940
    assert found["telegrad_waits", (("host", "host"), ("kind", "gate"), ("worker", "a"))] == 1
    assert found["telegrad_up", (("worker", "a"),)] == 1
    assert found["telegrad_up", (("worker", "b"),)] == 0


def test_a_worker_that_only_serves_has_no_old_call() -> None:
    waiting = LiveCall(1, "a", "b", "a collective", 10.0, state="sent")
    here = (("host", "host"), ("worker", "a"))
    assert samples(GroupView((worker(made=(waiting,)),)))["telegrad_oldest_call_seconds", here] == 0
    live = (("direction", "made"), ("host", "host"), ("worker", "a"))
    assert samples(GroupView((worker(made=(waiting,)),)))["telegrad_live_calls", live] == 0
    calling = LiveCall(2, "a", "b", "m:f", 60.0, state="sent")
    assert samples(GroupView((worker(made=(waiting, calling)),)))["telegrad_oldest_call_seconds", here] == 40


def test_durations_are_counted_in_buckets_by_outcome() -> None:
    events = (
        Event(0, Kind.CALL, 1.0, 1.0004),
        Event(1, Kind.CALL, 1.0, 1.02),
        Event(2, Kind.CALL, 1.0, 99.0, outcome="DeadlineExceeded"),
        Event(3, Kind.MEMBER, 1.0, 1.0),
    )
    found = samples(GroupView((worker(*events, dropped=3),)))

    def count(bound: str, outcome: str) -> float:
        labels = {"host": "host", "worker": "a", "kind": "call", "outcome": outcome, "le": bound}
        return found["telegrad_duration_seconds_bucket", tuple(sorted(labels.items()))]

    assert [count(bound, "ok") for bound in ("0.0001", "0.0005", "0.025", "+Inf")] == [0, 1, 2, 2]
    assert [count(bound, "error") for bound in ("60.0", "+Inf")] == [0, 1]
    assert found["telegrad_dropped_events_total", (("host", "host"), ("worker", "a"))] == 3


def test_durations_add_up_over_looks() -> None:
    durations = Durations()
    for _ in range(2):
        durations.add([worker(Event(0, Kind.PASS, 1.0, 2.0))])
    assert durations.sums == {("a", "host", "pass", "ok"): 2.0}


def test_every_listed_name_is_served_and_every_served_name_is_listed() -> None:
    view = SyntheticGroup().view(100_600.0)
    waiting = worker(waits=(Wait("gate", (), 1.0, "x"),))
    served = {name for name, _ in samples(GroupView((*view.workers, waiting)))}
    assert served == metrics.names()


def test_the_grafana_dashboard_uses_metrics_that_exist() -> None:
    panels = json.loads((ROOT / "docs" / "grafana.json").read_text())["panels"]
    used = set()
    for panel in panels:
        for target in panel.get("targets", []):
            found = set(re.findall(r"\btelegrad_\w+", target["expr"]))
            assert found, f"{panel['title']}: {target['expr']} names no metric"
            used |= found
    assert len(used) > 12
    assert used <= metrics.names(), f"unknown: {used - metrics.names()}"


def test_the_docs_list_every_metric() -> None:
    text = (ROOT / "docs" / "metrics.md").read_text()
    listed = set(re.findall(r"`(telegrad_\w+)`", text))
    wanted = {
        re.sub(r"_(bucket|count|sum)$", "", name) if name.startswith(metrics.DURATION) else name
        for name in metrics.names()
    }
    assert listed == wanted


def test_a_missing_extra_is_named() -> None:
    with pytest.raises(TelegradError, match=r"pip install 'telegrad\[metrics\]'"):
        metrics.check_installed(lambda name: None)
