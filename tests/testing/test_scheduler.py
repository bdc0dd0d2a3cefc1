"""Clocks that jump, and workers that are slow or stopped."""

from __future__ import annotations

import gc
import weakref

import pytest

from telegrad.testing.scheduler import Scheduler, SimRuntime


def waiting_thread(scheduler: Scheduler, node: str, seconds: float) -> list[float]:
    runtime = SimRuntime(scheduler, node)
    woke: list[float] = []

    def run() -> None:
        runtime.event().wait(runtime.now() + seconds)
        woke.append(scheduler.now)

    scheduler.start(node, "waits", run)
    return woke


def sleep(scheduler: Scheduler, seconds: float) -> None:
    SimRuntime(scheduler, "").event().wait(scheduler.now + seconds)


def test_a_clock_that_jumps_ends_the_waits_of_its_worker_only() -> None:
    scheduler = Scheduler(1)

    def main() -> tuple[list[float], list[float]]:
        jumping, other = waiting_thread(scheduler, "a", 10.0), waiting_thread(scheduler, "b", 10.0)
        sleep(scheduler, 1.0)
        scheduler.jump("a", 7.0)
        assert (scheduler.time_of("a"), scheduler.time_of("b")) == (8.0, 1.0)
        sleep(scheduler, 20.0)
        return jumping, other

    jumping, other = scheduler.run(main)
    assert jumping == [pytest.approx(3.0)]
    assert other == [10.0]


@pytest.mark.parametrize("seconds", [0.1, 1 / 3, 75.4])
def test_a_wait_ends_when_a_clock_that_jumped_cannot_show_its_deadline_exactly(seconds: float) -> None:
    scheduler = Scheduler(1)

    def main() -> None:
        scheduler.jump("a", seconds)
        for part in range(1, 50):
            waiting_thread(scheduler, "a", part / 7)
        sleep(scheduler, 20.0)

    scheduler.run(main)
    assert scheduler.switches < 300


def test_a_stopped_worker_goes_on_when_it_is_continued() -> None:
    scheduler = Scheduler(1)

    def main() -> list[float]:
        woke = waiting_thread(scheduler, "a", 1.0)
        sleep(scheduler, 0.5)
        scheduler.freeze("a", 30.0)
        sleep(scheduler, 50.0)
        return woke

    assert scheduler.run(main) == [30.0]


def test_a_slow_worker_is_late_and_then_normal_again() -> None:
    scheduler = Scheduler(1)

    def main() -> list[float]:
        scheduler.slow("a", until=5.0, shortest=0.5, longest=1.0)
        woke = waiting_thread(scheduler, "a", 1.0)
        sleep(scheduler, 10.0)
        woke += waiting_thread(scheduler, "a", 1.0)
        return woke

    (late,) = scheduler.run(main)
    assert 2.0 <= late <= 4.0  # late when it starts, and late when it wakes


def test_what_an_ended_thread_held_is_freed_while_others_wait() -> None:
    class Thing:
        pass

    scheduler = Scheduler(1)
    things: list[weakref.ref[Thing]] = []

    def start_one() -> None:
        thing = Thing()
        things.append(weakref.ref(thing))
        scheduler.start("a", "holds something", lambda: sleep(scheduler, 0.0 if thing else 1.0))

    def main() -> None:
        for _ in range(5):
            waiting_thread(scheduler, "a", 10.0)
            start_one()
        sleep(scheduler, 5.0)
        gc.collect()
        assert [thing() for thing in things] == [None] * 5

    scheduler.run(main)
