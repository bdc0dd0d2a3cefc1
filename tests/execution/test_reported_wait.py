"""Waits that are reported ever more rarely, in virtual time."""

from __future__ import annotations

from telegrad.execution.reported_wait import ReportedWait
from telegrad.testing.simulation import Simulation
from telegrad.waiting_report import WaitingReport


def test_a_wait_is_reported_ever_more_rarely_until_it_ends() -> None:
    reports: list[float] = []
    with Simulation(seed=1, workers=["a"]) as sim:

        def program() -> None:
            agent = sim["a"]
            with ReportedWait(agent.runtime, agent.executor, lambda elapsed: reports.append(round(elapsed, 3))) as wait:
                sim.sleep(13.0)
                assert not wait.over
            assert wait.over
            sim.sleep(100.0)

        sim.run(program)
    assert reports == [3.0, 6.0, 12.0]


def test_waits_that_share_a_schedule_are_one_for_the_user() -> None:
    reports: list[float] = []
    with Simulation(seed=1, workers=["a"]) as sim:

        def program() -> None:
            agent = sim["a"]
            schedule = WaitingReport(agent.runtime.now(), 5.0)
            for _ in range(25):
                with ReportedWait(agent.runtime, agent.executor, reports.append, schedule):
                    sim.sleep(1.0)

        sim.run(program)
    assert [round(elapsed) for elapsed in reports] == [5, 10, 20]
