"""Processes that join a universe: under new names, or in the place of another one."""

from __future__ import annotations

from dataclasses import replace

from telegrad.testing.universe.plan import Action, Fault, Plan, draw_plan
from telegrad.testing.universe.run import run_plan


def plan_of(*faults: Fault) -> Plan:
    """Return a plan in which one worker sleeps for a minute while these faults happen."""
    programs = (("w0", (Action("sleep", seconds=60.0),)),)
    plan = replace(draw_plan(1), workers=("w0", "w1", "w2"), resumable=True, reorders=False, programs=programs)
    return replace(plan, gathers=(), autograd_program=None, rpc_timeout=0.0, faults=faults)


def test_a_worker_joins_and_is_called_and_leaves_and_returns() -> None:
    report = run_plan(plan_of(Fault(0.1, "join", ("n0",)), Fault(0.2, "visit", ("n1",), 5.0)))
    assert report.counts["joined"] == 2
    assert report.counts["voted"] == 1
    for event in ("n0   has joined", "n1   has left", "n1   is there again, in generation 1"):
        assert event in report.story


def test_a_third_process_that_wants_a_place_has_its_own_address() -> None:
    report = run_plan(plan_of(Fault(0.1, "contest", ("w2",)), Fault(0.2, "contest", ("w2",), 0.01)))
    assert report.counts["fault contest"] == 2
    assert report.counts["voted"] == 1
    assert report.counts["not admitted"] == 2


def test_a_worker_that_runs_in_another_place_is_killed_there() -> None:
    usurped = Fault(0.1, "usurpation", ("w2",), 80.0)
    plan = plan_of(usurped, Fault(100.0, "kill", ("w2",)), Fault(101.0, "restart", ("w1",)))
    report = run_plan(replace(plan, programs=(("w0", (Action("sleep", seconds=120.0),)),)))
    assert report.counts["vouched"] == 2
    assert report.counts["fault kill"] == 1
