"""A deterministic scheduler: virtual time, and threads that run one at a time.

Threads are real, but only the one that holds the baton runs. It gives the baton up only where it waits, to a runnable
thread drawn at random from a seed. If no thread is runnable, the clock jumps to the next timer. If there is no timer
either, the program hangs, and the simulation reports where.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
import random
import selectors
import sys
import threading
import traceback
import warnings
from _thread import allocate_lock
from collections.abc import Callable
from typing import Any

from telegrad.waiting import Event, Thread


class SimulationStuck(AssertionError):
    """Every thread waits, and no timer is set: the program hangs."""


class Killed(BaseException):
    """Unwinds a thread when the simulation is over."""


class SimThread:
    """One simulated thread."""

    def __init__(self, scheduler: Scheduler, node: str, name: str, target: Callable[[], None]) -> None:
        self.scheduler = scheduler
        self.node = node
        self.name = name
        self.number = next(scheduler.numbers)
        self.baton = allocate_lock()
        self.baton.acquire()
        self.ended = SimEvent(scheduler)
        self.killed = False
        self.is_delayed = False
        """Whether it could run, but its worker is slow."""
        self.alarm: tuple[float, Callable[[], None]] | None = None
        """If it waits with a deadline: the deadline, by the clock of its worker, and what to do then."""
        self.alarm_timer: list[Callable[[], None]] = []
        self.error: BaseException | None = None
        self._target = target
        self.thread = threading.Thread(target=self._run, name=f"sim:{node}:{name}", daemon=True)

    def _run(self) -> None:
        self.baton.acquire()
        try:
            if not self.killed:
                self._target()
        except Killed:
            return
        except BaseException as error:  # noqa: BLE001 - the simulation reports it
            self.error = error
            self.scheduler.failed(self, error)
        finally:
            self.scheduler.threads.pop(self.number, None)
            self.ended.set()
            self.scheduler.leave(self)

    def join(self, deadline: float | None) -> bool:
        return self.ended.wait(deadline)


class SimEvent:
    """An event that waits in virtual time."""

    __slots__ = ("_is_set", "_scheduler", "_waiters")

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._is_set = False
        self._waiters: dict[int, SimThread] = {}

    def set(self) -> None:
        self._is_set = True
        waiters = list(self._waiters.values())
        self._waiters.clear()
        for thread in waiters:
            self._scheduler.make_runnable(thread)

    def is_set(self) -> bool:
        return self._is_set

    def wait(self, deadline: float | None) -> bool:
        scheduler = self._scheduler
        if self._is_set:
            return True
        me = scheduler.current
        if deadline is not None and deadline <= scheduler.time_of(me.node):
            return False
        self._waiters[me.number] = me

        def give_up() -> None:
            if self._waiters.pop(me.number, None) is not None:
                scheduler.make_runnable(me)

        if deadline is not None:
            scheduler.set_alarm(me, deadline, give_up)
        try:
            scheduler.switch(me)
        finally:
            self._waiters.pop(me.number, None)
            if me.alarm is not None:
                me.alarm = None
                scheduler.cancel(me.alarm_timer)
        return self._is_set


class Scheduler:
    """Decides which thread runs, and what time it is."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now = 0.0
        self.numbers = itertools.count(1)
        self.threads: dict[int, SimThread] = {}
        self.runnable: list[SimThread] = []
        self.errors: list[tuple[SimThread, BaseException]] = []
        self.loops: list[asyncio.AbstractEventLoop] = []
        self.switches = 0
        self._ahead: dict[str, float] = {}  # by how much the clocks of workers are ahead
        self._lags: dict[str, tuple[float, float, float]] = {}  # the workers that are slow: see `slow`
        self._timers: list[tuple[float, int, list[Callable[[], None]]]] = []
        self._order = itertools.count()
        self._over = False
        self._is_stuck = False
        self.current: SimThread = None  # type: ignore[assignment]  # set by run, before anything reads it

    # -- timers -----------------------------------------------------------------------------------------------

    def at(self, when: float, action: Callable[[], None]) -> list[Callable[[], None]]:
        """Run `action`, which must not wait, at a given time. Returns a handle for `cancel`."""
        cell = [action]
        heapq.heappush(self._timers, (max(when, self.now), next(self._order), cell))
        return cell

    def cancel(self, cell: list[Callable[[], None]]) -> None:
        """Cancel a timer."""
        cell.clear()

    # -- clocks -----------------------------------------------------------------------------------------------

    def time_of(self, node: str) -> float:
        """Return the time by the clock of a worker."""
        return self.now + self._ahead.get(node, 0.0)

    def jump(self, node: str, seconds: float) -> None:
        """Let the clock of one worker jump forward. It stays ahead of the others."""
        self._ahead[node] = self._ahead.get(node, 0.0) + seconds
        for thread in self.threads.values():
            if thread.node == node and thread.alarm is not None:
                self.cancel(thread.alarm_timer)
                self.set_alarm(thread, *thread.alarm)

    def set_alarm(self, thread: SimThread, deadline: float, action: Callable[[], None]) -> None:
        """Run `action` at `deadline`, by the clock of the thread's worker, even if that clock jumps."""
        thread.alarm = deadline, action
        ahead = self._ahead.get(thread.node, 0.0)
        when = deadline - ahead
        while when + ahead < deadline:  # rounded down: the thread would find that it is too early, again and again
            when = math.nextafter(when, math.inf)
        thread.alarm_timer = self.at(when, action)

    # -- threads ----------------------------------------------------------------------------------------------

    def slow(self, node: str, until: float, shortest: float, longest: float) -> None:
        """Delay the threads of a worker until a given time, by a time drawn for each time that one could run."""
        self._lags[node] = until, shortest, longest

    def freeze(self, node: str, until: float) -> None:
        """Stop the threads of a worker until a given time, as SIGSTOP does."""
        self._lags[node] = until, until - self.now, until - self.now
        frozen = [thread for thread in self.runnable if thread.node == node]
        self.runnable = [thread for thread in self.runnable if thread.node != node]
        for thread in frozen:
            self.make_runnable(thread)

    def _lag_of(self, node: str) -> float:
        until, shortest, longest = self._lags[node]
        if self.now >= until:
            del self._lags[node]
            return 0.0
        return min(until - self.now, self.random.uniform(shortest, longest))

    def start(self, node: str, name: str, target: Callable[[], None]) -> SimThread:
        """Start a thread. It runs when the scheduler picks it."""
        thread = SimThread(self, node, name, target)
        self.threads[thread.number] = thread
        thread.thread.start()
        self.make_runnable(thread)
        return thread

    def make_runnable(self, thread: SimThread) -> None:
        """Mark a thread as runnable: at once, or later if its worker is slow."""
        if thread.killed or thread.is_delayed or thread in self.runnable:
            return
        lag = self._lag_of(thread.node) if thread.node in self._lags else 0.0
        if not lag:
            self.runnable.append(thread)
            return
        thread.is_delayed = True

        def run() -> None:
            thread.is_delayed = False
            if not thread.killed:
                self.runnable.append(thread)

        self.at(self.now + lag, run)

    def kill(self, node: str) -> None:
        """Stop all threads of `node`."""
        for thread in self.threads.values():
            if thread.node == node:
                thread.killed = True
        self.runnable = [thread for thread in self.runnable if not thread.killed]
        self._lags.pop(node, None)
        self._ahead.pop(node, None)

    def failed(self, thread: SimThread, error: BaseException) -> None:
        """Record that a thread ended with an exception."""
        if not self._over:
            self.errors.append((thread, error))

    def switch(self, me: SimThread) -> None:
        """Let other threads run until the scheduler picks this one again."""
        if self._over:
            raise Killed
        chosen = self._pick()
        if chosen is not me:
            self._hand_over(chosen)
            del chosen  # it may end, with all that it holds, while this one waits
            me.baton.acquire()
        if me.killed:
            raise Killed
        if self._is_stuck:
            raise SimulationStuck("no thread can run")

    def leave(self, me: SimThread) -> None:
        """Hand over to another thread because this one ends."""
        if not self._over:
            self._hand_over(self._pick())

    def _hand_over(self, thread: SimThread) -> None:
        self.switches += 1
        self.current = thread
        thread.baton.release()

    def _pick(self) -> SimThread:
        while not self.runnable:
            while self._timers and not self._timers[0][2]:
                heapq.heappop(self._timers)
            if not self._timers:
                return self._stuck()
            when, _, cell = heapq.heappop(self._timers)
            self.now = max(self.now, when)
            cell.pop()()
        return self.runnable.pop(self.random.randrange(len(self.runnable)))

    def _stuck(self) -> SimThread:
        """Let the main thread raise `SimulationStuck`."""
        self._is_stuck = True
        return self.main

    # -- running --------------------------------------------------------------------------------------------

    main: SimThread

    def run(self, program: Callable[[], Any]) -> Any:
        """Run `program` as the main simulated thread, on the calling thread, and return its result."""
        self.main = SimThread(self, "", "main", lambda: None)
        self.threads[self.main.number] = self.main
        self.current = self.main
        try:
            return program()
        except SimulationStuck as stuck:
            raise SimulationStuck(f"at {self.now:.3f} s no thread can run:\n{self.stacks()}") from stuck
        finally:
            self.close()

    def close(self) -> None:
        """Unwind all remaining threads."""
        self._over = True
        for loop in self.loops:
            loop.set_exception_handler(lambda *_: None)  # it would report the coroutines that were killed
        self.threads.pop(self.main.number, None)
        while self.threads:  # an executor may start a thread while another one unwinds
            _, thread = self.threads.popitem()
            thread.killed = True
            thread.baton.release()
            thread.thread.join(10)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # coroutines that their worker has not begun
            for loop in self.loops:  # of killed workers
                if not loop.is_closed():
                    loop.close()

    def stacks(self) -> str:
        """Return the stack of every thread, for the report of a hang."""
        frames = sys._current_frames()
        lines = []
        for thread in self.threads.values():
            frame = frames.get(thread.thread.ident or 0)
            if frame is not None and not thread.killed:
                where = "".join(traceback.format_stack(frame)[-10:-2])
                lines.append(f"-- {thread.node}:{thread.name}\n{where}")
        return "\n".join(lines)


class SimRuntime:
    """The runtime of one simulated worker."""

    preemptive = False

    def __init__(self, scheduler: Scheduler, node: str) -> None:
        self._scheduler = scheduler
        self._node = node

    def now(self) -> float:
        return self._scheduler.time_of(self._node)

    def event(self) -> Event:
        return SimEvent(self._scheduler)

    def start_thread(self, name: str, target: Callable[[], None]) -> Thread:
        return self._scheduler.start(self._node, name, target)

    def random_bits(self, count: int) -> int:
        return self._scheduler.random.getrandbits(count)

    def new_event_loop(self) -> asyncio.AbstractEventLoop:
        """Return an asyncio loop that waits in virtual time."""
        loop = _SimLoop(self)
        self._scheduler.loops.append(loop)
        return loop


class _SimSelector(selectors.SelectSelector):
    """Watches no files; waits for a wake-up or the loop's next timer."""

    def __init__(self, runtime: SimRuntime) -> None:
        super().__init__()
        self._runtime = runtime
        self._woken = runtime.event()

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None or timeout > 0:
            self._woken.wait(None if timeout is None else self._runtime.now() + timeout)
        self._woken = self._runtime.event()
        return []

    def wake(self) -> None:
        self._woken.set()


class _SimLoop(asyncio.SelectorEventLoop):
    def __init__(self, runtime: SimRuntime) -> None:
        self._sim_selector = _SimSelector(runtime)
        self._sim_runtime = runtime
        super().__init__(self._sim_selector)

    def time(self) -> float:
        return self._sim_runtime.now()

    def _write_to_self(self) -> None:
        self._sim_selector.wake()
