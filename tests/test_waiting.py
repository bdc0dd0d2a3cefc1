"""Events: every wait ends when the event is set or at its deadline."""

from __future__ import annotations

import threading
import time

import pytest

from telegrad.testing.scheduler import Scheduler, SimRuntime
from telegrad.waiting import Event, RealRuntime

PATIENCE = 20.0


@pytest.fixture
def runtime() -> RealRuntime:
    return RealRuntime()


def soon() -> float:
    return time.monotonic() + PATIENCE


def test_waiting_for_an_event_that_is_set_returns_at_once(runtime: RealRuntime) -> None:
    event = runtime.event()
    assert not event.is_set()
    event.set()
    assert event.is_set()
    assert event.wait(None)
    assert event.wait(soon())
    assert event.wait(runtime.now() - 1)


def test_setting_an_event_again_does_nothing(runtime: RealRuntime) -> None:
    event = runtime.event()
    for _ in range(3):
        event.set()
    assert event.wait(None)
    assert event.wait(None)


def test_a_wait_ends_at_its_deadline_and_not_before(runtime: RealRuntime) -> None:
    event = runtime.event()
    for seconds in (-1.0, 0.0, 0.02):
        deadline = runtime.now() + seconds
        assert not event.wait(deadline)
        assert runtime.now() >= deadline - 0.001
    assert not event.is_set()


def test_a_deadline_beyond_the_maximum_of_locks_is_no_error(runtime: RealRuntime) -> None:
    event = runtime.event()
    thread = runtime.start_thread("setter", event.set)
    assert event.wait(runtime.now() + threading.TIMEOUT_MAX * 10)
    assert thread.join(soon())


def test_one_set_ends_the_waits_of_many_threads(runtime: RealRuntime) -> None:
    event, ended = runtime.event(), []
    waiting = threading.Barrier(21)

    def wait() -> None:
        waiting.wait(PATIENCE)
        ended.append(event.wait(soon()))

    threads = [runtime.start_thread(f"waiter {number}", wait) for number in range(20)]
    waiting.wait(PATIENCE)
    event.set()
    assert all(thread.join(soon()) for thread in threads)
    assert ended == [True] * 20


def test_many_threads_can_set_one_event_at_the_same_time(runtime: RealRuntime) -> None:
    for _ in range(50):
        event = runtime.event()
        together = threading.Barrier(4)

        ended: list[bool] = []

        def race(event: Event = event, together: threading.Barrier = together, ended: list[bool] = ended) -> None:
            together.wait(PATIENCE)
            event.set()
            ended.append(event.wait(soon()))

        threads = [runtime.start_thread("racer", race) for _ in range(4)]
        assert all(thread.join(soon()) for thread in threads)
        assert ended == [True] * 4, "a thread that failed has recorded nothing"


def test_join_returns_whether_the_thread_has_ended(runtime: RealRuntime) -> None:
    go_on = runtime.event()

    def hold() -> None:
        go_on.wait(soon())

    thread = runtime.start_thread("held", hold)
    assert not thread.join(runtime.now() + 0.01)
    go_on.set()
    assert thread.join(None)


def test_threads_have_their_name_and_are_daemons(runtime: RealRuntime) -> None:
    seen: list[threading.Thread] = []
    assert runtime.start_thread("telegrad:a:runner", lambda: seen.append(threading.current_thread())).join(soon())
    assert [(thread.name, thread.daemon) for thread in seen] == [("telegrad:a:runner", True)]


def test_the_clock_is_monotonic(runtime: RealRuntime) -> None:
    times = [runtime.now() for _ in range(100)]
    assert times == sorted(times)


def test_random_bits_are_in_range_and_differ(runtime: RealRuntime) -> None:
    drawn = [runtime.random_bits(63) for _ in range(100)]
    assert len(set(drawn)) == 100
    assert all(0 <= number < 2**63 for number in drawn)
    assert {runtime.random_bits(1) for _ in range(200)} == {0, 1}


def test_in_simulation_a_deadline_takes_no_real_time() -> None:
    scheduler = Scheduler(seed=1)
    runtime = SimRuntime(scheduler, "a")

    def program() -> tuple[bool, float, bool, float]:
        never, later = runtime.event(), runtime.event()
        scheduler.at(5000.0, later.set)
        first = never.wait(runtime.now() + 3600)
        at = runtime.now()
        return first, at, later.wait(None), runtime.now()

    assert scheduler.run(program) == (False, 3600.0, True, 5000.0)


def test_in_simulation_a_thread_is_joined_in_virtual_time() -> None:
    scheduler = Scheduler(seed=1)
    runtime = SimRuntime(scheduler, "a")

    def program() -> tuple[bool, bool, float]:
        def sleep() -> None:
            runtime.event().wait(100.0)

        thread = runtime.start_thread("sleeper", sleep)
        return thread.join(50.0), thread.join(None), runtime.now()

    assert scheduler.run(program) == (False, True, 100.0)
