"""Runs user functions, and makes sure that somebody always serves.

Threads of an agent are *runners*. A runner does one of three things: it runs a task, it polls (waits for all links at
once, reads what came, and runs due timers), or it is parked. One rule holds it all together:

    At any time some runner that is not blocked either polls or will look for tasks and poll next.

So the runner that reads a request runs it at once, with no hand-over to another thread. Only when it is about to
wait (a nested call, a gate: it says so through `wait` or `wait_for_link`), or has been at one task for longer than two
milliseconds (the watchdog sees it, as Go's scheduler does), does another runner take over; it is unparked, or started
if none is parked. So nesting can never use the threads up, and a slow function delays nobody. Runners that are parked
for long end.

A runner that waits for the answer of a nested call keeps an eye on the poller itself, and hands over only when there
is something to serve.

If the system has no thread to give, nothing fails: what waits for a runner stays queued, and the watchdog tries again
every AGAIN seconds. No exception ends the watchdog, and one that ends a runner calls another.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Protocol, TypeVar

import torch

from telegrad.errors import ResourceExhausted, is_shortage
from telegrad.transport.base import Link, Poller, Ready
from telegrad.waiting import Event, Runtime, Thread

_log = logging.getLogger("telegrad")

T = TypeVar("T")
Task = Callable[[], object]

PARKED_FOR = 10.0  # seconds after which a runner that has nothing to do ends
SLOW = 0.002  # seconds at one task after which another runner takes over
SELDOM = 2  # times as long between two looks of the watchdog, if it finds nothing running time and again
_SECOND_CHANCE = 1.0  # seconds, for threads that have not ended in time
CALM = 0.05  # seconds without a task after which the watchdog rests
AGAIN = 0.05  # seconds before what the system refused is tried again


class Timer:
    """Something to be done at a time, unless it is cancelled before."""

    __slots__ = ("action", "when")

    def __init__(self, when: float, action: Task) -> None:
        self.when = when
        self.action: Task | None = action


class Owed(partial[object]):
    """A task that somebody may wait for whatever happens: it runs even if the executor is being stopped."""


class Holding(Protocol):
    """What a thread has for itself alone, and must not keep from others while it waits."""

    def suspend(self) -> None:
        """Let others have it."""

    def resume(self) -> None:
        """Have it again. May wait, and raises if there is no point in that any more."""


class _Runner(threading.local):
    """What the current thread is to this executor."""

    held: Holding | None = None
    mine = False
    counted = False  # its task counts as a user function that runs
    number = 0


class Executor:
    """The threads of one agent."""

    def __init__(
        self, runtime: Runtime, poller: Poller, poll: Callable[[float | None], None], *, name: str, most_running: int
    ) -> None:
        self._runtime = runtime
        self._poller = poller
        self._poll = poll
        self._name = name
        self._most_running = most_running
        self.current = self._current = _Runner()
        # protects everything below
        self._lock = threading.Lock()
        self._urgent: deque[Task] = deque()  # never waits for user functions to end
        self._ready: deque[Task] = deque()  # user functions
        self._polling = False
        self._parked: list[Event] = []
        self._unblocked = 0  # runners that are neither parked nor waiting
        self._running = 0  # runners that run a user function and do not wait in it
        self._started = 0  # tasks ever started; the watchdog compares
        self._stopping = False
        self._threads: dict[int, Thread] = {}
        self._numbers = itertools.count(1)
        self._timers: list[tuple[float, int, Timer]] = []
        self._cancelled_timers = 0
        self._timer_order = itertools.count()
        self._watchdog_rests: Event | None = None
        self._seen, self._calm_since, self._rarer = -1, 0.0, 1  # from one look of the watchdog to the next
        self._no_thread: Exception | None = None  # why the last runner could not be started
        self._never = runtime.event()  # never set; to pause with, where there may be no memory for another

    # -- life -------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the first runner."""
        with self._lock:
            started = self._start_runner()
        if not started:
            raise self._without_threads(self._no_thread) from self._no_thread
        if self._runtime.preemptive:
            self.start_thread("watchdog", self._watch)

    def stop(self, deadline: float) -> list[str]:
        """End all runners. Returns the names of those that would not end (they are in user code that does)."""
        with self._lock:
            self._stopping = True
            owed = [task for task in self._ready if isinstance(task, Owed)]
            self._ready.clear()
            self._ready.extend(owed)
            for event in self._parked:
                event.set()
            if self._watchdog_rests is not None:
                self._watchdog_rests.set()
        self._poller.wake()
        own = self._current.number  # a runner that stops its own agent ends when it returns from here
        while True:
            with self._lock:
                alive = {number: thread for number, thread in self._threads.items() if number != own}
            late = [number for number, thread in alive.items() if not thread.join(deadline)]
            # If this thread was held up itself, the deadline may have passed before they had a chance.
            again = self._runtime.now() + _SECOND_CHANCE
            stuck = [number for number in late if not alive[number].join(again)]
            if stuck or not alive:
                return [f"{self._name}:{number}" for number in stuck]

    def start_thread(self, role: str, target: Task) -> None:
        """Run `target` on a thread of its own, which `stop` joins. Raises ResourceExhausted if there is none."""
        number = next(self._numbers)

        def run() -> None:
            self._current.number = number
            torch.get_num_threads()  # see _run
            try:
                target()
            except Exception:  # noqa: BLE001 - the last place where it can be seen
                _log.exception("worker %s: the %s thread ended", self._name, role)
            finally:
                with self._lock:
                    self._threads.pop(number, None)

        with self._lock:
            self._threads[number] = _Starting()
        try:
            thread = self._runtime.start_thread(f"telegrad:{self._name}:{role}", run)
        except Exception as error:
            with self._lock:
                self._threads.pop(number, None)
            raise self._without_threads(error) from error
        with self._lock:
            if number in self._threads:
                self._threads[number] = thread

    def _without_threads(self, error: Exception | None) -> ResourceExhausted:
        return ResourceExhausted(
            f"worker {self._name!r} cannot start a thread: {error}. Raise its limit of threads (ulimit -u, pids.max) "
            "or of memory",
            worker=self._name,
        )

    def thread_count(self) -> int:
        """Threads that are alive, for debug info."""
        with self._lock:
            return len(self._threads)

    def running_count(self) -> int:
        """Runners that run a user function and do not wait in it, for debug info."""
        with self._lock:
            return self._running

    # -- tasks ------------------------------------------------------------------------------------------------

    def submit(self, task: Task, *, urgent: bool = False) -> None:
        """Have a runner run `task`. Urgent tasks are short, and run even when all user functions are slow."""
        with self._lock:
            if self._stopping and not isinstance(task, Owed):
                return
            (self._urgent if urgent else self._ready).append(task)
            if not (self._current.mine and self._unblocked):
                self._serve()
            elif self._watchdog_rests is not None:  # this runner, or the watchdog, will see to it
                self._watchdog_rests.set()

    def submit_all(self, tasks: Iterable[Owed]) -> None:
        """Have runners run all `tasks`, for which one is woken, not one for each."""
        with self._lock:
            self._ready.extend(tasks)
            if self._current.mine and self._unblocked:
                self._alert()
            else:
                self._serve()

    def _alert(self) -> None:
        """Let the watchdog look: a runner at work may be slow. Called with the lock held."""
        if self._watchdog_rests is not None:
            self._watchdog_rests.set()

    def _serve(self) -> None:
        """Make sure that a runner looks for tasks now. Called with the lock held."""
        if self._polling:
            self._poller.wake()
        elif self._parked:
            self._parked.pop().set()
        elif not self._unblocked:
            self._start_runner()
        else:
            self._alert()  # a runner is at work; it looks for tasks when it is done, or the watchdog calls another

    def _start_runner(self) -> bool:
        """Start a runner. False: there is no thread for it; the watchdog will try again. Called with the lock held."""
        number = next(self._numbers)
        self._threads[number] = _Starting()
        self._unblocked += 1
        # Not under the lock: starting a thread waits until it runs.
        self._lock.release()
        thread, failure = None, None
        try:
            thread = self._runtime.start_thread(f"telegrad:{self._name}:runner", lambda: self._run(number))
        except Exception as error:  # noqa: BLE001 - whoever is served must not fail because another cannot be, yet
            failure = error
        finally:
            self._lock.acquire()
            if thread is None:
                self._unblocked -= 1
                self._threads.pop(number, None)
        if thread is None:
            if self._no_thread is None:  # once for each shortage
                _log.warning(
                    "worker %s has no thread for a task, which waits until there is one: %s", self._name, failure
                )
            self._no_thread = failure
            self._alert()
            return False
        self._no_thread = None
        if number in self._threads:
            self._threads[number] = thread
        return True

    def _run(self, number: int) -> None:
        current = self._current
        current.mine = True
        current.number = number
        torch.get_num_threads()  # or torch would start a pool of threads of its own for this one, whatever was set
        lock, urgent, ready, poll, now = self._lock, self._urgent, self._ready, self._poll, self._runtime.now
        counted = False
        try:
            while True:
                task: Task | None = None
                event: Event | None = None
                with lock:
                    if counted:
                        self._running -= 1
                        counted = False
                    if urgent:
                        task = urgent.popleft()
                    elif ready and self._running < self._most_running:
                        task = ready.popleft()
                        counted = True
                        self._running += 1
                    elif self._stopping:
                        return
                    elif not self._polling:
                        self._polling = True
                    else:
                        event = self._runtime.event()
                        self._parked.append(event)
                        self._unblocked -= 1
                    self._started += 1
                    resting = self._watchdog_rests
                if task is not None:
                    if resting is not None:
                        resting.set()
                    current.counted = counted
                    try:
                        task()
                    except Exception:  # noqa: BLE001 - tasks report their own errors; this is one of ours
                        _log.exception("worker %s: a task failed", self._name)
                elif event is None:
                    try:
                        timers = self._timers  # see _next_timer
                        poll(timers[0][0] if timers else None)
                        timers = self._timers
                        if timers and timers[0][0] <= now():
                            self._run_timers()
                    except Exception:  # noqa: BLE001 - whatever it is, somebody has to go on polling
                        _log.exception("worker %s: polling failed; it goes on", self._name)
                        self._never.wait(now() + AGAIN)  # what failed may be ready still
                    finally:
                        self._polling = False
                elif not self._park(event):
                    return
        except Exception:  # noqa: BLE001 - no memory, most likely: another runner takes over
            _log.exception("worker %s: a runner ended", self._name)
        finally:
            with lock:
                self._running -= counted
                self._unblocked -= 1
                self._threads.pop(number, None)
                owed = self._ready and self._running < self._most_running
                if owed if self._stopping else not self._polling:
                    self._serve()

    def _park(self, event: Event) -> bool:
        """Wait to be called. False: nobody did for long, and this runner may end."""
        called = event.wait(self._runtime.now() + PARKED_FOR)
        with self._lock:
            if event in self._parked:
                self._parked.remove(event)
            else:
                called = True
            self._unblocked += 1
        return called

    # -- waiting ----------------------------------------------------------------------------------------------

    def wait(self, event: Event, deadline: float | None) -> bool:
        """Wait for `event`: the one way to wait on a thread that may be a runner."""
        if event.is_set():
            return True
        if self._current.held is not None:
            return self.without_held(partial(self.wait, event, deadline))
        if not self._current.mine:
            return event.wait(deadline)
        self.block()
        try:
            return event.wait(deadline)
        finally:
            self.unblock()

    def pause(self) -> None:
        """Wait for a moment: the system refused something, and may grant it then."""
        self.wait(self._never, self._runtime.now() + AGAIN)

    def hold(self, held: Holding | None) -> None:
        """Have the current thread let go of this whenever it waits."""
        self._current.held = held

    def without_held(self, wait: Callable[[], T]) -> T:
        """Wait while others may have what this thread holds."""
        current = self._current
        held, current.held = current.held, None
        assert held is not None
        try:
            held.suspend()
            try:
                return wait()
            finally:
                held.resume()
        finally:
            current.held = held

    def block(self) -> None:
        """This thread is about to wait for something that only others can bring about."""
        if self._current.mine:
            with self._lock:
                self._block()

    def unblock(self) -> None:
        """This thread goes on."""
        if self._current.mine:
            with self._lock:
                self._unblocked += 1
                self._running += self._current.counted

    def _block(self) -> None:
        self._unblocked -= 1
        self._running -= self._current.counted
        if self._ready or self._urgent or not (self._polling or self._stopping):
            self._serve()

    def wait_for_link(self, link: Link, deadline: float | None) -> int:
        """Wait until `link` can be read. A runner serves meanwhile, through another, if there is anything to serve."""
        if self._current.held is not None:
            return self.without_held(partial(self.wait_for_link, link, deadline))
        if not self._current.mine:
            return link.wait(deadline)
        with self._lock:
            watching = not (self._polling or self._urgent or self._ready or self._stopping)
            if watching:
                self._polling = True
            else:
                self._block()
        try:
            while True:
                until = deadline
                if watching:
                    timer = self._next_timer()
                    if timer is not None and (deadline is None or timer < deadline):
                        until = timer
                ready = link.wait(until, self._poller if watching else None)
                if not watching:
                    return ready
                if ready & Ready.READ or (deadline is not None and self._runtime.now() >= deadline):
                    return ready
                if ready & Ready.POLLER or (until != deadline and self._runtime.now() >= (until or 0.0)):
                    watching = False
                    with self._lock:
                        self._polling = False
                        self._block()
                else:
                    return ready
        finally:
            with self._lock:
                if watching:
                    self._polling = False
                    self._alert()
                else:
                    self._unblocked += 1
                    self._running += self._current.counted

    # -- timers -----------------------------------------------------------------------------------------------

    def at(self, when: float, action: Task) -> Timer:
        """Run `action` at `when`, on a runner. It must be short."""
        timer = Timer(when, action)
        with self._lock:
            first = not self._timers or when < self._timers[0][0]
            heapq.heappush(self._timers, (when, next(self._timer_order), timer))
            if first and self._polling and not self._stopping:
                self._poller.wake()
        return timer

    def cancel(self, timer: Timer) -> None:
        """Do not run it."""
        with self._lock:
            if timer.action is not None:
                timer.action = None
                self._cancelled_timers += 1
                if self._cancelled_timers > 64 and self._cancelled_timers * 2 > len(self._timers):
                    self._timers = [entry for entry in self._timers if entry[2].action is not None]
                    heapq.heapify(self._timers)
                    self._cancelled_timers = 0

    def _next_timer(self) -> float | None:
        # Without the lock: only whoever polls takes timers out, and one that is put in meanwhile wakes the poller.
        timers = self._timers
        return timers[0][0] if timers else None

    def _run_timers(self) -> None:
        now = self._runtime.now()
        while True:
            with self._lock:
                if not self._timers or self._timers[0][0] > now:
                    return
                timer = heapq.heappop(self._timers)[2]
                action, timer.action = timer.action, None
                if action is None:
                    self._cancelled_timers -= 1
            if action is not None:
                try:
                    action()
                except Exception as error:  # noqa: BLE001 - as for tasks
                    _log.exception("worker %s: a timer's task failed", self._name)
                    if is_shortage(error):
                        self._put_off(timer, action)

    def _put_off(self, timer: Timer, action: Task) -> None:
        """What a shortage kept a timer from doing is done later."""
        with self._lock:
            if timer.action is None:
                timer.action, timer.when = action, self._runtime.now() + AGAIN
                heapq.heappush(self._timers, (timer.when, next(self._timer_order), timer))

    # -- watchdog ---------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Call another runner whenever nobody polls and none of those at work has started anything new for a while."""
        self._calm_since = self._runtime.now()
        while True:
            try:
                if not self._look():
                    return
            except Exception:  # noqa: BLE001 - without the watchdog, slow functions would run one after the other
                _log.exception("worker %s: the watchdog failed; it goes on", self._name)
                self._never.wait(self._runtime.now() + AGAIN)

    def _look(self) -> bool:
        """Look once, and wait until it is time for the next look. False: the executor has been stopped."""
        pause = self._runtime.event()
        rests = False
        again = 0.0
        with self._lock:
            if self._stopping and not (self._ready and self._running < self._most_running):
                return False  # whoever ends sees to what is owed
            waiting = (
                not (self._polling or self._stopping)
                or bool(self._urgent)
                or (bool(self._ready) and self._running < self._most_running)
            )
            if waiting and self._started == self._seen:
                if self._parked:
                    self._parked.pop().set()
                elif not self._start_runner():
                    again = AGAIN
            # Each look interrupts whoever runs, and of many short tasks most looks find none.
            self._rarer = 1 if waiting else min(2 * self._rarer, SELDOM)
            now = self._runtime.now()
            if waiting or self._started != self._seen:
                self._calm_since = now
            elif now - self._calm_since > CALM:
                self._watchdog_rests, rests = pause, True
            self._seen = self._started
        pause.wait(None if rests else now + max(again, SLOW * self._rarer))
        if rests:
            self._rarer = 1
            with self._lock:
                self._watchdog_rests = None
            self._calm_since = self._runtime.now()
        return True


class _Starting:
    """Stands for a thread between its number and its start."""

    def join(self, deadline: float | None) -> bool:
        return True
