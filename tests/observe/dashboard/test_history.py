from __future__ import annotations

import itertools

import msgspec
import pytest
from tests.support.synthetic_group import SyntheticGroup

from telegrad.observe.dashboard.history import SPAN, STEP, History
from telegrad.observe.model import GroupView


def test_rates_are_differences_per_second_of_the_workers_clock() -> None:
    group, history = SyntheticGroup(), History()
    for now in (100_600.0, 100_602.0):
        history.add(group.view(now))
    assert history.rates["trainer"].calls == pytest.approx(140, abs=1)
    assert history.rates["stage0"].served == pytest.approx(90, abs=1)
    assert history.rates["trainer"].memory == group.view(100_602.0).workers[0].memory


def test_a_replaced_worker_is_not_compared_with_the_one_before() -> None:
    group, history = SyntheticGroup(), History()
    history.add(group.view(100_600.0))
    view = group.view(100_602.0)
    trainer = msgspec.structs.replace(view.workers[0], incarnation=1, calls_made=3)
    point = history.add(GroupView((trainer, *view.workers[1:]), now=view.now))
    assert history.rates["trainer"].calls == 0
    assert point is not None
    assert "trainer" not in point.workers
    assert "stage0" in point.workers


def test_points_keep_their_distance_and_are_bounded() -> None:
    group, history = SyntheticGroup(stages=1), History()
    for look in range(int(SPAN / STEP) + 50):
        history.add(group.view(100_000.0 + look * STEP))
        history.add(group.view(100_000.5 + look * STEP))
    times = [point.at for point in history.points]
    assert len(times) == SPAN / STEP
    assert {later - earlier for earlier, later in itertools.pairwise(times)} == {STEP}


def test_a_pass_through_many_workers_counts_once_in_the_group() -> None:
    group, history = SyntheticGroup(stages=3), History()
    first, last = (group.view(now) for now in (100_600.0, 100_602.0))
    history.add(first)
    history.add(last)
    begun = last.workers[0].passes_run - first.workers[0].passes_run
    assert begun > 0
    assert sum(rates.passes for rates in history.rates.values()) == pytest.approx(begun / 2, abs=0.01)
