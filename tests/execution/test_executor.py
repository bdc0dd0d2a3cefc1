"""The executor: somebody always serves, whatever user functions do."""

from __future__ import annotations

import errno
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing

import pytest

from telegrad.errors import ResourceExhausted
from telegrad.execution.executor import PARKED_FOR, Executor, Owed
from telegrad.testing.scheduler import Scheduler, SimRuntime
from telegrad.transport.base import Poller, Ready
from telegrad.transport.memory import MemoryNetwork, MemoryTransport
from telegrad.transport.socket_link import SocketLink
from telegrad.transport.sockets import SocketPoller
from telegrad.waiting import Event, RealRuntime, Runtime, Thread
from telegrad.wire.frames import Kind

PATIENCE = 20.0


def soon() -> float:
    return time.monotonic() + PATIENCE


def in_turn(*actions: Callable[[], object]) -> Callable[[], None]:
    """A task that does one thing after the other."""

    def task() -> None:
        for action in actions:
            action()

    return task


class Served:
    """An executor whose poller is served as an agent does: what is ready is noted."""

    def __init__(self, runtime: Runtime, poller: Poller, *, most_running: int = 16) -> None:
        self.runtime = runtime
        self.poller = poller
        self.polled: list[object] = []
        self.on_ready: Callable[[object], None] = self.polled.append
        self.executor = Executor(runtime, poller, self._poll, name="w", most_running=most_running)

    def _poll(self, until: float | None) -> None:
        for item, _ in self.poller.wait(until):
            self.on_ready(item)

    def event(self) -> Event:
        return self.runtime.event()


@pytest.fixture
def served() -> Iterator[Served]:
    yield from serve(most_running=16)


@pytest.fixture
def narrow() -> Iterator[Served]:
    yield from serve(most_running=2)


def serve(most_running: int) -> Iterator[Served]:
    with closing(SocketPoller()) as poller:
        served = Served(RealRuntime(), poller, most_running=most_running)
        served.executor.start()
        yield served
        assert served.executor.stop(soon()) == []


# -- tasks ----------------------------------------------------------------------------------------------------


def test_a_task_runs_on_a_thread_of_the_executor(served: Served) -> None:
    ran, names = served.event(), []
    served.executor.submit(in_turn(lambda: names.append(threading.current_thread().name), ran.set))
    assert ran.wait(soon())
    assert names == ["telegrad:w:runner"]


def test_tasks_start_in_the_order_in_which_they_were_submitted() -> None:
    with closing(SocketPoller()) as poller:
        served = Served(RealRuntime(), poller, most_running=1)
        order: list[int] = []
        done = served.event()
        for number in range(100):
            served.executor._ready.append(lambda number=number: order.append(number))  # type: ignore[misc]  # mypy cannot type a default
        served.executor._ready.append(done.set)
        served.executor.start()
        assert done.wait(soon())
        assert served.executor.stop(soon()) == []
        assert order == list(range(100))


def test_a_task_that_fails_is_logged_and_the_next_one_runs(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    ran = served.event()

    def fail() -> None:
        raise ValueError("a bug of ours")

    with caplog.at_level(logging.ERROR, "telegrad"):
        served.executor.submit(fail)
        served.executor.submit(ran.set)
        assert ran.wait(soon())
        deadline = soon()
        while (
            "a bug of ours" not in caplog.text and time.monotonic() < deadline
        ):  # another runner may have run the next
            served.event().wait(time.monotonic() + 0.005)
    assert "worker w: a task failed" in caplog.text
    assert "a bug of ours" in caplog.text


def test_a_slow_task_does_not_keep_others_from_running(served: Served) -> None:
    release, others = served.event(), [served.event() for _ in range(5)]
    started = served.event()

    def slow() -> None:
        started.set()
        release.wait(soon())  # not through the executor: it looks like work that takes long

    served.executor.submit(slow)
    assert started.wait(soon())
    for other in others:
        served.executor.submit(other.set)
        assert other.wait(soon())
    release.set()


def test_tasks_that_were_submitted_together_all_run_though_one_is_slow(served: Served) -> None:
    release, others = served.event(), [served.event() for _ in range(5)]
    served.executor.submit_all([lambda: release.wait(soon()), *(other.set for other in others)])  # type: ignore[list-item]  # returns a bool
    for other in others:
        assert other.wait(soon())
    release.set()


def test_tasks_that_were_submitted_together_wake_the_poller_once(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    polls, wake, woken = served.event(), served.poller.wake, []
    served.executor.submit(polls.set)
    assert polls.wait(soon())
    monkeypatch.setattr(served.poller, "wake", lambda: (woken.append(1), wake()))
    events = [served.event() for _ in range(50)]
    served.executor.submit_all([event.set for event in events])
    assert all(event.wait(soon()) for event in events)
    assert len(woken) <= 1


def test_a_slow_task_does_not_keep_the_poller_from_being_served(served: Served) -> None:
    release, started, found = served.event(), served.event(), served.event()
    served.on_ready = lambda item: found.set()
    served.executor.submit(in_turn(started.set, lambda: release.wait(soon())))
    assert started.wait(soon())
    here, there = links()
    with closing(here), closing(there):
        served.poller.add(there, read=True, once=True)
        here.send(Kind.HANDSHAKE, b"x", 0, 0, 0)
        assert found.wait(soon())
        release.set()


def test_many_slow_tasks_all_run_at_once_up_to_the_limit(narrow: Served) -> None:
    release = narrow.event()
    running: list[int] = []
    all_started, done = [narrow.event() for _ in range(4)], [narrow.event() for _ in range(4)]
    lock = threading.Lock()
    most = 0

    def slow(number: int) -> None:
        nonlocal most
        with lock:
            running.append(number)
            most = max(most, len(running))
        all_started[number].set()
        release.wait(soon())
        with lock:
            running.remove(number)
        done[number].set()

    for number in range(4):
        narrow.executor.submit(lambda number=number: slow(number))  # type: ignore[misc]  # mypy cannot type a default
    assert all_started[0].wait(soon())
    assert all_started[1].wait(soon())
    urgent = narrow.event()
    narrow.executor.submit(urgent.set, urgent=True)
    assert urgent.wait(soon()), "an urgent task waited for user functions"
    assert not all_started[2].is_set()
    release.set()
    assert all(event.wait(soon()) for event in done)
    assert most == 2


def test_tasks_that_wait_do_not_count_as_running(narrow: Served) -> None:
    release = narrow.event()
    waiting = [narrow.event() for _ in range(20)]
    ended = [narrow.event() for _ in range(20)]

    def wait(number: int) -> None:
        waiting[number].set()
        assert narrow.executor.wait(release, soon())
        ended[number].set()

    for number in range(20):
        narrow.executor.submit(lambda number=number: wait(number))  # type: ignore[misc]  # mypy cannot type a default
    assert all(event.wait(soon()) for event in waiting), "tasks that wait kept others from starting"
    release.set()
    assert all(event.wait(soon()) for event in ended)


def test_nesting_never_uses_the_threads_up(narrow: Served) -> None:
    depth = 500
    results = [narrow.event() for _ in range(depth)]

    def nest(level: int) -> None:
        if level + 1 < depth:
            narrow.executor.submit(lambda: nest(level + 1))
            assert narrow.executor.wait(results[level + 1], soon())
        results[level].set()

    narrow.executor.submit(lambda: nest(0))
    assert results[0].wait(soon())


def test_a_wait_through_the_executor_ends_at_its_deadline(served: Served) -> None:
    outcome: list[bool] = []
    done = served.event()

    def task() -> None:
        outcome.append(served.executor.wait(served.event(), time.monotonic() + 0.02))
        outcome.append(served.executor.wait(done_before, soon()))
        done.set()

    done_before = served.event()
    done_before.set()
    served.executor.submit(task)
    assert done.wait(soon())
    assert outcome == [False, True]
    assert not served.executor.wait(served.event(), time.monotonic() + 0.01), "also on a thread that is no runner"


def test_tasks_can_be_submitted_from_many_threads_and_none_is_lost(served: Served) -> None:
    count, lock, done = 0, threading.Lock(), served.event()

    def task() -> None:
        nonlocal count
        with lock:
            count += 1
            if count == 2000:
                done.set()

    def submit() -> None:
        for _ in range(500):
            served.executor.submit(task)

    threads = [threading.Thread(target=submit) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert done.wait(soon())


# -- links ----------------------------------------------------------------------------------------------------


def links() -> tuple[SocketLink, SocketLink]:
    here, there = socket.socketpair()
    return SocketLink(here, peer="there", resumable=False), SocketLink(there, peer="here", resumable=False)


def test_a_runner_that_waits_for_its_answer_serves_others(served: Served) -> None:
    here, there = links()
    waiting, answered, other = served.event(), served.event(), served.event()
    outcome: list[int] = []

    def call() -> None:
        waiting.set()
        while True:
            ready = served.executor.wait_for_link(there, soon())
            if ready & Ready.READ:
                break
        outcome.append(ready)
        answered.set()

    with closing(here), closing(there):
        served.executor.submit(call)
        assert waiting.wait(soon())
        served.executor.submit(other.set)
        assert other.wait(soon())
        here.send(Kind.HANDSHAKE, b"answer", 0, 0, 0)
        assert answered.wait(soon())
    assert [ready & Ready.READ for ready in outcome] == [Ready.READ]  # the poller may be ready as well


def test_timers_run_while_the_only_runner_waits_for_its_answer(served: Served) -> None:
    here, there = links()
    waiting, answered, rang = served.event(), served.event(), served.event()

    def call() -> None:
        waiting.set()
        while not served.executor.wait_for_link(there, soon()) & Ready.READ:
            pass
        answered.set()

    with closing(here), closing(there):
        served.executor.submit(call)
        assert waiting.wait(soon())
        served.executor.at(time.monotonic() + 0.01, rang.set)
        assert rang.wait(soon())
        here.send(Kind.HANDSHAKE, b"answer", 0, 0, 0)
        assert answered.wait(soon())


def test_waiting_for_a_link_ends_at_its_deadline(served: Served) -> None:
    here, there = links()
    done, outcome = served.event(), []

    def call() -> None:
        deadline = time.monotonic() + 0.02
        ready = Ready.NOTHING
        while time.monotonic() < deadline:
            ready = served.executor.wait_for_link(there, deadline)
        outcome.append(ready)
        done.set()

    with closing(here), closing(there):
        served.executor.submit(call)
        assert done.wait(soon())
        assert not served.executor.wait_for_link(there, time.monotonic() + 0.01), "also on a thread that is no runner"
    assert outcome == [Ready.NOTHING]


def test_nested_calls_over_links_never_use_the_threads_up(narrow: Served) -> None:
    depth = 100
    pairs = [links() for _ in range(depth)]
    done = narrow.event()

    def nest(level: int) -> None:
        if level + 1 < depth:
            narrow.executor.submit(lambda: nest(level + 1))
            while not narrow.executor.wait_for_link(pairs[level][1], soon()) & Ready.READ:
                pass
        if level:
            pairs[level - 1][0].send(Kind.HANDSHAKE, b"answer", 0, 0, 0)
        else:
            done.set()

    narrow.executor.submit(lambda: nest(0))
    ended = done.wait(soon())
    for here, there in pairs:
        here.close()
        there.close()
    assert ended


# -- timers ---------------------------------------------------------------------------------------------------


def test_timers_run_in_the_order_of_their_times_and_cancelled_ones_do_not(served: Served) -> None:
    order: list[str] = []
    done = served.event()
    now = time.monotonic() + 0.25  # all are set by then, also on a loaded machine
    served.executor.at(now + 0.04, done.set)
    for name, after in [("third", 0.03), ("first", 0.01), ("never", 0.015), ("second", 0.02), ("same", 0.02)]:
        timer = served.executor.at(now + after, lambda name=name: order.append(name))  # type: ignore[misc]  # mypy cannot type a default
        if name == "never":
            served.executor.cancel(timer)
            served.executor.cancel(timer)
    assert done.wait(soon())
    assert order == ["first", "second", "same", "third"]


def test_a_timer_does_not_run_before_its_time(served: Served) -> None:
    rang, when = served.event(), time.monotonic() + 0.03
    at: list[float] = []
    served.executor.at(when, in_turn(lambda: at.append(time.monotonic()), rang.set))
    assert rang.wait(soon())
    assert at[0] >= when


def test_an_earlier_timer_does_not_wait_for_a_later_one(served: Served) -> None:
    rang = served.event()
    later = served.executor.at(time.monotonic() + 1000, lambda: None)
    served.executor.at(time.monotonic() + 0.01, rang.set)
    assert rang.wait(soon())
    served.executor.cancel(later)


def test_timers_run_beside_a_slow_task(served: Served) -> None:
    release, started, rang = served.event(), served.event(), served.event()
    served.executor.submit(in_turn(started.set, lambda: release.wait(soon())))
    assert started.wait(soon())
    served.executor.at(time.monotonic(), rang.set)
    assert rang.wait(soon())
    release.set()


def test_a_timer_that_fails_is_logged_and_the_next_one_runs(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    rang = served.event()

    def fail() -> None:
        raise ValueError("a bug of ours")

    with caplog.at_level(logging.ERROR, "telegrad"):
        served.executor.at(time.monotonic(), fail)
        served.executor.at(time.monotonic(), rang.set)
        assert rang.wait(soon())
    assert "a bug of ours" in caplog.text


def test_cancelled_timers_are_not_kept(served: Served) -> None:
    far = time.monotonic() + 10_000
    for _ in range(1000):
        served.executor.cancel(served.executor.at(far, lambda: None))
    assert len(served.executor._timers) <= 130


# -- the end --------------------------------------------------------------------------------------------------


def test_stop_names_the_threads_that_would_not_end() -> None:
    with closing(SocketPoller()) as poller:
        served = Served(RealRuntime(), poller)
        served.executor.start()
        release, started = served.event(), served.event()
        served.executor.submit(in_turn(started.set, lambda: release.wait(soon())))
        assert started.wait(soon())
        stuck = served.executor.stop(time.monotonic() + 0.1)
        assert len(stuck) == 1
        assert stuck[0].startswith("w:")
        release.set()
        assert served.executor.stop(soon()) == []
        assert served.executor.thread_count() == 0


def test_what_is_owed_runs_though_the_executor_is_being_stopped_and_the_rest_does_not() -> None:
    with closing(SocketPoller()) as poller:
        served = Served(RealRuntime(), poller, most_running=1)
        served.executor.start()
        busy, release, ran = served.event(), served.event(), served.event()
        order: list[str] = []
        served.executor.submit(in_turn(busy.set, lambda: release.wait(soon())))
        assert busy.wait(soon())
        served.executor.submit(lambda: order.append("a request"))
        served.executor.submit(Owed(in_turn(lambda: order.append("owed before"))))
        served.executor.stop(time.monotonic() - 1)
        served.executor.submit(lambda: order.append("a late request"))
        served.executor.submit_all([Owed(in_turn(lambda: order.append("owed since"), ran.set))])
        release.set()
        assert ran.wait(soon())
        assert served.executor.stop(soon()) == []
        served.executor.submit_all([Owed(in_turn(lambda: order.append("owed at last")))])
        assert served.executor.stop(soon()) == []
        assert order == ["owed before", "owed since", "owed at last"]


def test_what_is_owed_does_not_wait_for_what_is_slow_while_stopping() -> None:
    with closing(SocketPoller()) as poller:
        served = Served(RealRuntime(), poller)
        served.executor.start()
        second_ran, waited = threading.Event(), []
        with served.executor._lock:  # nobody takes them before the end has begun
            served.executor._ready.append(Owed(lambda: waited.append(second_ran.wait(PATIENCE))))
            served.executor._ready.append(Owed(second_ran.set))
        assert served.executor.stop(soon()) == []
        assert waited == [True]


def test_stop_ends_runners_whatever_they_wait_in() -> None:
    with closing(SocketPoller()) as poller:
        served = Served(RealRuntime(), poller)
        served.executor.start()
        release, parked = served.event(), served.event()
        started = [served.event() for _ in range(5)]
        for event in started:
            served.executor.submit(in_turn(event.set, lambda: served.executor.wait(release, soon())))
        assert all(event.wait(soon()) for event in started)
        release.set()  # now they park, but for the one that polls
        served.executor.submit(parked.set)
        assert parked.wait(soon())
        assert served.executor.thread_count() >= 2
        assert served.executor.stop(soon()) == []
        assert served.executor.thread_count() == 0


def test_a_runner_can_stop_its_own_executor() -> None:
    with closing(SocketPoller()) as poller:
        served = Served(RealRuntime(), poller)
        served.executor.start()
        outcome: list[list[str]] = []
        done = served.event()
        served.executor.submit(in_turn(lambda: outcome.append(served.executor.stop(soon())), done.set))
        assert done.wait(soon())
        assert outcome == [[]]
        assert served.executor.stop(soon()) == []


def test_other_threads_of_the_executor_are_joined_and_their_errors_logged(caplog: pytest.LogCaptureFixture) -> None:
    with closing(SocketPoller()) as poller:
        served = Served(RealRuntime(), poller)
        served.executor.start()
        names: list[str] = []

        def fail() -> None:
            names.append(threading.current_thread().name)
            raise ValueError("a bug of ours")

        served.executor.start_thread("island", fail)
        assert served.executor.stop(soon()) == []
        assert names == ["telegrad:w:island"]
        assert "worker w: the island thread ended" in caplog.text


# -- in virtual time ------------------------------------------------------------------------------------------


def simulate(seed: int, program: Callable[[Served, Scheduler], None], *, most_running: int = 2) -> None:
    scheduler = Scheduler(seed)
    runtime = SimRuntime(scheduler, "w")
    transport = MemoryTransport(MemoryNetwork(runtime))
    served = Served(runtime, transport.poller(), most_running=most_running)

    def main() -> None:
        served.executor.start()
        program(served, scheduler)
        assert served.executor.stop(scheduler.now + 1) == []

    scheduler.run(main)
    assert scheduler.errors == []


def test_runners_that_are_parked_for_long_end() -> None:
    def program(served: Served, scheduler: Scheduler) -> None:
        release, started = served.event(), [served.event() for _ in range(10)]
        for event in started:
            served.executor.submit(in_turn(event.set, lambda: served.executor.wait(release, None)))
        for event in started:
            assert event.wait(scheduler.now + 60)
        assert served.executor.thread_count() == 11
        release.set()
        served.event().wait(scheduler.now + PARKED_FOR / 2)
        assert served.executor.thread_count() == 11
        served.event().wait(scheduler.now + PARKED_FOR)
        assert served.executor.thread_count() == 1
        again = served.event()
        served.executor.submit(again.set)
        assert again.wait(scheduler.now + 60)

    simulate(1, program)


@pytest.mark.parametrize("seed", range(10))
def test_nested_waits_and_timers_end_in_every_order(seed: int) -> None:
    def program(served: Served, scheduler: Scheduler) -> None:
        random = scheduler.random
        done: list[Event] = []

        def task(depth: int, end: Event) -> None:
            for _ in range(random.randrange(3) if depth else 0):
                inner = served.event()
                start = served.executor.submit if random.random() < 0.7 else delayed
                start(lambda inner=inner: task(depth - 1, inner))  # type: ignore[misc]  # mypy cannot type a default
                assert served.executor.wait(inner, None)
            end.set()

        def delayed(action: Callable[[], None]) -> None:
            served.executor.at(scheduler.now + random.random(), lambda: served.executor.submit(action))

        for _ in range(20):
            done.append(served.event())
            served.executor.submit(lambda end=done[-1]: task(4, end))  # type: ignore[misc]  # mypy cannot type a default
        for event in done:
            assert event.wait(scheduler.now + 1000)

    simulate(seed, program)


# -- the watchdog -------------------------------------------------------------------------------------------


def rests(served: Served) -> bool:
    """Wait until the watchdog has nothing to watch; there is nothing to be notified by."""
    deadline = soon()
    while served.executor._watchdog_rests is None and time.monotonic() < deadline:
        served.event().wait(time.monotonic() + 0.005)
    return served.executor._watchdog_rests is not None


def test_a_task_submitted_by_a_long_task_does_not_wait_for_it(served: Served) -> None:
    ran, done = served.event(), served.event()
    outcome: list[bool] = []

    def slow() -> None:
        outcome.append(rests(served))
        served.executor.submit(ran.set)
        outcome.append(ran.wait(soon()))
        done.set()

    served.executor.submit(slow)
    assert done.wait(soon())
    assert outcome == [True, True]


def test_a_task_that_is_slow_after_a_nested_call_delays_nobody(served: Served) -> None:
    here, there = links()
    ran, back, done = served.event(), served.event(), served.event()
    outcome: list[bool] = []

    def slow() -> None:
        while not served.executor.wait_for_link(there, soon()) & Ready.READ:
            pass
        back.set()
        outcome.append(ran.wait(soon()))
        done.set()

    with closing(here), closing(there):
        served.executor.submit(slow)
        assert rests(served)
        here.send(Kind.HANDSHAKE, b"x", 0, 0, 0)
        assert back.wait(soon())
        served.executor.submit(ran.set)
        assert done.wait(soon())
    assert outcome == [True]


def test_nothing_runs_after_stop(served: Served) -> None:
    assert served.executor.stop(soon()) == []
    ran = served.event()
    served.executor.submit(ran.set)
    assert served.executor.thread_count() == 0
    assert not ran.is_set()


# -- shortages ------------------------------------------------------------------------------------------------


class Short(RealRuntime):
    """A system that has no threads, or no memory for events, while `threads` or `events` says so."""

    def __init__(self) -> None:
        self.threads = self.events = False
        self.refused = threading.Event()

    def start_thread(self, name: str, target: Callable[[], None]) -> Thread:
        if self.threads:
            self.refused.set()
            raise RuntimeError("can't start new thread")
        return super().start_thread(name, target)

    def event(self) -> Event:
        if self.events:
            self.refused.set()
            raise MemoryError
        return super().event()


@pytest.fixture
def short() -> Iterator[tuple[Served, Short]]:
    with closing(SocketPoller()) as poller:
        runtime = Short()
        served = Served(runtime, poller)
        served.executor.start()
        yield served, runtime
        runtime.threads = runtime.events = False
        assert served.executor.stop(soon()) == []


def test_a_runner_that_could_not_be_started_is_started_when_there_are_threads_again(
    short: tuple[Served, Short],
) -> None:
    served, runtime = short
    go, meet = served.event(), threading.Barrier(3)
    runtime.threads = True
    served.executor.submit(lambda: go.wait(soon()))  # the one runner is busy, and there is no other
    ran = [served.event() for _ in range(3)]
    for event in ran:
        served.executor.submit(in_turn(lambda: meet.wait(PATIENCE), event.set))
    assert runtime.refused.wait(PATIENCE)
    runtime.threads = False
    assert all(event.wait(soon()) for event in ran)  # which takes three at one time, beside the busy one
    go.set()


def test_a_task_that_waits_while_no_thread_can_be_started_is_woken_and_the_next_one_runs(
    short: tuple[Served, Short],
) -> None:
    served, runtime = short
    inner, outer = served.event(), served.event()
    runtime.threads = True
    served.executor.submit(in_turn(lambda: served.executor.wait(inner, soon()), outer.set))
    assert runtime.refused.wait(PATIENCE)
    served.executor.submit(inner.set)  # nobody is there to run it
    runtime.threads = False
    assert outer.wait(soon())


def test_the_first_runner_that_cannot_be_started_is_an_error_with_its_cause() -> None:
    with closing(SocketPoller()) as poller:
        runtime = Short()
        served = Served(runtime, poller)
        runtime.threads = True
        with pytest.raises(ResourceExhausted, match="worker 'w' cannot start a thread: can't start new thread"):
            served.executor.start()
        assert served.executor.thread_count() == 0
        assert served.executor.stop(soon()) == []


def test_the_watchdog_and_the_runners_outlive_a_lack_of_memory(
    short: tuple[Served, Short], caplog: pytest.LogCaptureFixture
) -> None:
    served, runtime = short
    begun, go = served.event(), served.event()
    ran = [served.event() for _ in range(4)]
    runtime.events = True
    served.executor.submit(in_turn(begun.set, lambda: go.wait(soon())))  # wakes the watchdog, which needs an event
    assert begun.wait(soon())
    assert runtime.refused.wait(PATIENCE)
    runtime.events = False
    for event in ran:
        served.executor.submit(event.set)
    assert all(event.wait(soon()) for event in ran)  # beside the slow one: the watchdog called another runner
    go.set()


def test_an_exception_while_polling_ends_no_polling(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    failed, seen = served.event(), served.event()

    def fail_once(item: object) -> None:
        if not failed.is_set():
            failed.set()
            raise OSError(errno.ENOMEM, "Cannot allocate memory")
        seen.set()

    served.on_ready = fail_once
    ours, theirs = socket.socketpair()
    with theirs, closing(SocketLink(ours, peer="p", resumable=False)) as link:
        served.poller.add(link, read=True)
        theirs.send(b"x")
        assert seen.wait(soon())
        served.poller.remove(link)
    assert "polling failed; it goes on" in caplog.text


def test_a_timer_whose_task_met_a_shortage_is_tried_again(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    tries: list[int] = []
    done = served.event()

    def need_memory() -> None:
        tries.append(1)
        if len(tries) < 3:
            raise MemoryError
        done.set()

    served.executor.at(served.runtime.now(), need_memory)
    assert done.wait(soon())
    assert len(tries) == 3
