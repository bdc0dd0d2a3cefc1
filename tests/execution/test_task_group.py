"""Only some tasks of a group run at the same time, not counting those that wait, and other tasks pass them."""

from __future__ import annotations

from tests.support.executors import ExecutorHarness, soon

from telegrad.execution.task_group import TaskGroup


def test_tasks_of_a_group_run_one_at_a_time_and_in_order(harness: ExecutorHarness) -> None:
    group, order, running = TaskGroup(1), [], []
    done = harness.event()

    def task(number: int) -> None:
        running.append(group.running)
        order.append(number)
        if number == 49:
            done.set()

    for number in range(50):
        harness.executor.submit_in(group, lambda number=number: task(number))  # type: ignore[misc]  # as elsewhere
    assert done.wait(soon())
    assert order == list(range(50))
    assert running == [1] * 50


def test_a_task_that_waits_lets_the_next_one_of_its_group_run(harness: ExecutorHarness) -> None:
    group = TaskGroup(1)
    second_ran, first_ended = harness.event(), harness.event()

    def first() -> None:
        assert harness.executor.wait(second_ran, soon())
        first_ended.set()

    harness.executor.submit_in(group, first)
    harness.executor.submit_in(group, second_ran.set)
    assert first_ended.wait(soon())
    ended = harness.event()
    harness.executor.submit_in(group, ended.set)
    assert ended.wait(soon())
    assert not group.waiting


def test_other_tasks_pass_a_group_that_may_not_start_more(harness: ExecutorHarness) -> None:
    group, started, release, passed = TaskGroup(1), harness.event(), harness.event(), harness.event()
    harness.executor.submit_in(group, lambda: (started.set(), _spin(release)))
    for _ in range(100):
        harness.executor.submit_in(group, lambda: None)
    assert started.wait(soon())
    harness.executor.submit(passed.set)
    assert passed.wait(soon())
    assert len(group.waiting) == 100
    release.set()


def _spin(release: object) -> None:
    """Wait without telling the executor, as a function of a user does."""
    release.wait(soon())  # type: ignore[attr-defined]


def test_an_error_in_a_task_does_not_stop_its_group(harness: ExecutorHarness, caplog: object) -> None:
    group, done = TaskGroup(1), harness.event()

    def fail() -> None:
        raise ValueError("on purpose")

    harness.executor.submit_in(group, fail)
    harness.executor.submit_in(group, done.set)
    assert done.wait(soon())


def test_tasks_of_a_group_are_dropped_when_the_executor_stops(harness: ExecutorHarness) -> None:
    group = TaskGroup(1)
    harness.executor.stop(soon())
    harness.executor.submit_in(group, lambda: None)
    assert not group.waiting
    assert not group.queued
