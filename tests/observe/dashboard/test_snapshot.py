from __future__ import annotations

import pytest
from tests.support.synthetic_group import STEP, SyntheticGroup

from telegrad.observe.dashboard.snapshot import MOST_CALLS, snapshot
from telegrad.observe.model import GroupView, LiveCall, PassView, WorkerView


def worker(name: str, *made: LiveCall, **fields: object) -> WorkerView:
    return WorkerView(name, 0, 1, 0, "host", 1, (), 100.0, 0.0, 0.0, made=made, **fields)  # type: ignore[arg-type]


def test_a_call_is_shown_once_with_what_both_ends_know() -> None:
    group = SyntheticGroup(stages=2, stuck_since=100_600.4)
    found = snapshot(group.view(100_700.0), {})
    assert [(call.caller, call.callee) for call in found.calls] == [("trainer", "stage0"), ("stage0", "stage1")]
    outer, inner = found.calls
    assert (outer.state, outer.made_at, outer.runs_at) == ("running", "train.py:40", "stage.py:88")
    assert inner.parent == ("trainer", outer.id)
    assert 99 < found.now - outer.began < 102  # on the observer's clock, though the workers' clocks differ


def test_workers_that_do_not_answer_are_listed_with_the_reason() -> None:
    members = {"a": "alive", "b": "lost", "c": "alive"}
    view = GroupView((worker("a", members=members),), {"c": "no answer within 2 s"}, now=100.0)
    rows = {row.name: (row.state, row.reason) for row in snapshot(view, {}).workers}
    assert rows == {"a": ("alive", ""), "b": ("lost", ""), "c": ("silent", "no answer within 2 s")}


def test_a_pass_shows_what_each_worker_does_in_it() -> None:
    group = SyntheticGroup(stages=2)
    found = snapshot(group.view(group.began + 5.6 * STEP), {})
    assert [part.worker for part in found.passes[0].parts] == ["trainer", "stage0", "stage1"]
    assert found.passes[0].began == pytest.approx(group.began + 5.5 * STEP)


def test_calls_are_bounded_and_all_are_counted() -> None:
    calls = [LiveCall(number, "a", "b", "f", float(-number)) for number in range(MOST_CALLS + 5)]
    found = snapshot(GroupView((worker("a", *calls),), now=100.0), {})
    assert len(found.calls) == MOST_CALLS
    assert found.calls_in_all == MOST_CALLS + 5
    assert found.calls[0].id == str(MOST_CALLS + 4)  # the oldest first


def test_two_passes_of_one_number_in_two_contexts_are_two() -> None:
    runs = tuple(PassView(1, context, 1.0, "a") for context in (5, 6))
    assert len(snapshot(GroupView((worker("a", passes=runs),), now=9.0), {}).passes) == 2


def test_workers_that_wait_in_a_collective_have_no_live_call() -> None:
    waiting = LiveCall(1, "a", "b", "a collective", 1.0)
    found = snapshot(GroupView((worker("a", waiting, LiveCall(2, "a", "b", "f", 2.0)),), now=9.0), {})
    assert ([call.id for call in found.calls], found.calls_in_all, found.workers[0].live_calls) == (["2"], 1, 1)


def test_a_call_of_a_worker_to_itself_shows_who_made_it_and_where() -> None:
    outer = LiveCall(9, "b", "a", "f", 1.0, state="running", where="prog.py:5 in f")
    made = LiveCall(2, "a", "a", "g", 2.0, parent=("b", 9), state="sent", where="prog.py:5 in f")
    served = LiveCall(2, "a", "a", "g", 2.0, state="queued")
    found = snapshot(GroupView((worker("a", made, served=(outer, served)),), now=9.0), {})
    inner = found.calls[1]
    assert (inner.id, inner.parent, inner.state) == ("2", ("b", "9"), "queued")
    assert (inner.made_at, inner.runs_at) == ("prog.py:5 in f", "")
