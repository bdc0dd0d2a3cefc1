"""Runs user functions on threads, and guarantees that the agent always serves its links.

Threads of an executor are *runners*. A runner runs a task, or polls (waits for all links at once, reads what arrived,
and runs due timers), or is parked. One rule holds:

    At any time some runner that is not blocked either polls or will look for tasks and poll next.

So the runner that reads a request also runs it, without a handoff between threads. Another runner takes over when
the first one is about to wait (in `wait` or `wait_for_link`) or has run one task for more than two milliseconds (the
watchdog checks). It is unparked, or started if none is parked. Nested calls therefore never exhaust the threads, and a
slow function delays no other. Runners that are idle for long end.

A runner that waits for the reply to a nested call watches the poller itself, and hands over only when there is
something to serve.

If the system refuses a thread, nothing fails: tasks stay queued, and the watchdog retries every RETRY_DELAY seconds.
No exception ends the watchdog, and a runner that dies is replaced.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from functools import partial
from typing import TypeVar

from telegrad.execution.run_queue import RunQueue, Task
from telegrad.execution.runner_loop import RunnerLoop
from telegrad.execution.task_group import TaskGroup
from telegrad.execution.thread_state import HeldResource, ThreadState
from telegrad.execution.threads import Threads
from telegrad.execution.timers import RETRY_DELAY, Timers
from telegrad.execution.watchdog import Watchdog
from telegrad.transport.base import Link, Poller, Ready
from telegrad.waiting import Event, Runtime

T = TypeVar("T")


class GuaranteedTask(partial[object]):
    """A task that runs even if the executor is being stopped, because a thread may be waiting for it."""


class Executor:
    """Runs the tasks of one agent."""

    def __init__(self, runtime: Runtime, poller: Poller, *, name: str, max_running: int) -> None:
        self._runtime = runtime
        self._poller = poller
        self.current = self._current = ThreadState()
        lock = threading.Lock()  # protects the queue and the tables of threads and timers
        self.threads = Threads(runtime, lock, self._current, name)
        self.queue = RunQueue(
            lock, poller, self.threads, lambda number: self._loop.run(number), name=name, max_running=max_running
        )
        self._lock = lock
        self.timers = Timers(runtime, poller, self.queue, name)
        self._loop = RunnerLoop(runtime, self.queue, self.threads, self.timers, self._current, poller, self.pause, name)
        self._watchdog = Watchdog(runtime, self.queue, name)
        self._never = runtime.event()  # never set; used to sleep when there is no memory for another event

    def start(self) -> None:
        """Start the first runner and the watchdog."""
        with self._lock:
            started = self.queue.start_runner()
            failure = self.queue.start_failure
        if not started:
            raise self.threads.exhausted(failure) from failure
        if self._runtime.preemptive:
            self.threads.start("watchdog", self._watchdog.run)

    def stop(self, deadline: float) -> list[str]:
        """End all threads. Returns what those execute that did not end because user code does not.

        A runner that stops its own executor ends when it returns from here.
        """
        queue = self.queue
        with self._lock:
            queue.stopping = True
            guaranteed = [task for task in queue.ready if isinstance(task, GuaranteedTask)]
            queue.ready.clear()
            queue.ready.extend(guaranteed)
            for event in queue.parked:
                event.set()
            queue.wake_watchdog()
        self._poller.wake()
        return self.threads.join(deadline)

    def running_count(self) -> int:
        """Return how many user functions are running and not waiting, for debug info."""
        with self._lock:
            return self.queue.running

    # -- tasks ------------------------------------------------------------------------------------------------

    def submit(self, task: Task, *, urgent: bool = False) -> None:
        """Run `task` on a runner. Urgent tasks are short, and run even if all user functions are slow."""
        queue = self.queue
        with self._lock:
            if queue.stopping and not isinstance(task, GuaranteedTask):
                return
            (queue.urgent if urgent else queue.ready).append(task)
            if not (self._current.is_runner and queue.unblocked):
                queue.dispatch()
            elif queue.watchdog_wakeup is not None:  # this runner will run the task, or the watchdog starts another
                queue.watchdog_wakeup.set()

    def submit_all(self, tasks: Iterable[GuaranteedTask]) -> None:
        """Run all `tasks` on runners, waking only one runner for them."""
        queue = self.queue
        with self._lock:
            queue.ready.extend(tasks)
            if self._current.is_runner and queue.unblocked:
                queue.wake_watchdog()
            else:
                queue.dispatch()

    def submit_in(self, group: TaskGroup, task: Task) -> None:
        """Run `task` on a runner, when its group may start another."""
        with self._lock:
            group.waiting.append(task)
            self._start_next(group)

    def _start_next(self, group: TaskGroup) -> None:
        """Queue the tasks of a group that may start. Call with the lock held."""
        queue = self.queue
        if queue.stopping:
            group.waiting.clear()
        while group.waiting and group.may_start():
            group.queued += 1
            queue.ready.append(partial(self._run_in, group, group.waiting.popleft()))
            if not (self._current.is_runner and queue.unblocked):
                queue.dispatch()
            else:
                queue.wake_watchdog()

    def _run_in(self, group: TaskGroup, task: Task) -> None:
        current = self._current
        with self._lock:
            group.queued -= 1
            group.running += 1
        current.group = group
        try:
            task()
        finally:
            current.group = None
            with self._lock:
                group.running -= 1
                self._start_next(group)

    # -- waiting ----------------------------------------------------------------------------------------------

    def wait(self, event: Event, deadline: float | None) -> bool:
        """Wait for `event`. Any thread that may be a runner must wait through this method."""
        if event.is_set():
            return True
        if self._current.held is not None:
            return self.suspend_held_during(partial(self.wait, event, deadline))
        if not self._current.is_runner:
            return event.wait(deadline)
        self.block()
        try:
            return event.wait(deadline)
        finally:
            self.unblock()

    def pause(self) -> None:
        """Wait for RETRY_DELAY, before retrying what the system refused."""
        self.wait(self._never, self._runtime.now() + RETRY_DELAY)

    def hold(self, held: HeldResource | None) -> None:
        """Set the resource that the current thread gives up whenever it waits."""
        self._current.held = held

    def suspend_held_during(self, wait: Callable[[], T]) -> T:
        """Call `wait` while other threads may take the resource that this thread holds."""
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
        """Announce that the current thread is about to wait for other threads."""
        if self._current.is_runner:
            with self._lock:
                self._block()

    def unblock(self) -> None:
        """Announce that the current thread continues."""
        if self._current.is_runner:
            with self._lock:
                self.queue.unblocked += 1
                self.queue.running += self._current.counted
                group = self._current.group
                if group is not None:
                    group.running += 1

    def _block(self) -> None:
        queue = self.queue
        queue.unblocked -= 1
        queue.running -= self._current.counted
        group = self._current.group
        if group is not None:
            group.running -= 1
            self._start_next(group)
        if queue.ready or queue.urgent or not (queue.polling or queue.stopping):
            queue.dispatch()

    def wait_for_link(self, link: Link, deadline: float | None) -> int:
        """Wait until `link` can be read. If there is something to serve meanwhile, another runner takes over."""
        if self._current.held is not None:
            return self.suspend_held_during(partial(self.wait_for_link, link, deadline))
        if not self._current.is_runner:
            return link.wait(deadline)
        queue, group = self.queue, self._current.group
        with self._lock:
            watching = not (queue.polling or queue.urgent or queue.ready or queue.stopping)
            if watching and not (group is not None and group.waiting):
                queue.polling = True
            else:
                watching = False
                self._block()
        try:
            while True:
                until = deadline
                if watching:
                    timer = self.timers.next_due()
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
                        queue.polling = False
                        self._block()
                else:
                    return ready
        finally:
            with self._lock:
                if watching:
                    queue.polling = False
                    queue.wake_watchdog()
                else:
                    queue.unblocked += 1
                    queue.running += self._current.counted
                    if group is not None:
                        group.running += 1
