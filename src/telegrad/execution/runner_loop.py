"""What a runner thread does: run tasks, poll, or park."""

from __future__ import annotations

import logging
from collections.abc import Callable

from telegrad.execution.run_queue import RunQueue, Task
from telegrad.execution.thread_state import ThreadState
from telegrad.execution.threads import Threads
from telegrad.execution.timers import RETRY_DELAY, Timers
from telegrad.transport.base import Poller
from telegrad.waiting import Event, Runtime

_log = logging.getLogger("telegrad")

IDLE_TIMEOUT = 10.0  # seconds after which a parked runner ends


class RunnerLoop:
    """The main function of every runner of one executor."""

    def __init__(
        self,
        runtime: Runtime,
        queue: RunQueue,
        threads: Threads,
        timers: Timers,
        current: ThreadState,
        poller: Poller,
        pause: Callable[[], None],
        name: str,
    ) -> None:
        self._runtime = runtime
        self._queue = queue
        self._threads = threads
        self._timers = timers
        self._current = current
        self._poller = poller
        self._pause = pause
        self._name = name
        self._never = runtime.event()  # never set; used to sleep when there is no memory for another event

    def run(self, number: int) -> None:
        """Serve until the executor stops, or until the runner was parked for IDLE_TIMEOUT."""
        current, queue, timers = self._current, self._queue, self._timers
        current.is_runner = True
        self._threads.enter(number)
        lock, urgent, ready, poll, now = queue.lock, queue.urgent, queue.ready, self._poller.wait, self._runtime.now
        counted = False
        try:
            while True:
                task: Task | None = None
                event: Event | None = None
                with lock:
                    if counted:
                        queue.running -= 1
                        counted = False
                    if urgent:
                        task = urgent.popleft()
                    elif ready and queue.running < queue.max_running:
                        task = ready.popleft()
                        counted = True
                        queue.running += 1
                    elif queue.stopping:
                        return
                    elif not queue.polling:
                        queue.polling = True
                    else:
                        event = self._runtime.event()
                        queue.parked.append(event)
                        queue.unblocked -= 1
                    queue.started += 1
                    watchdog_wakeup = queue.watchdog_wakeup
                if task is not None:
                    if watchdog_wakeup is not None:
                        watchdog_wakeup.set()
                    current.counted = counted
                    try:
                        task()
                    except Exception:  # noqa: BLE001 - tasks report their own errors, so this is a bug in telegrad
                        _log.exception("worker %s: a task failed", self._name)
                elif event is None:
                    try:
                        heap = timers.heap  # Timers.next_due, inlined
                        for item, readiness in poll(heap[0][0] if heap else None):
                            if item.owner is not None:
                                try:
                                    item.owner.on_ready(readiness)
                                except Exception:  # noqa: BLE001 - a bug, which must not keep the others from reading
                                    _log.exception("worker %r: reading a link failed", self._name)
                                    self._pause()
                        heap = timers.heap
                        if heap and heap[0][0] <= now():
                            timers.run_due()
                    except Exception:  # noqa: BLE001 - whatever the error is, polling must continue
                        _log.exception("worker %s: polling failed and continues", self._name)
                        self._never.wait(now() + RETRY_DELAY)  # what failed may still be ready
                    finally:
                        queue.polling = False
                elif not self._park(event):
                    return
        except Exception:  # noqa: BLE001 - most likely out of memory; another runner takes over
            _log.exception("worker %s: a runner ended", self._name)
        finally:
            with lock:
                queue.running -= counted
                queue.unblocked -= 1
                self._threads.discard(number)
                can_run = bool(ready) and queue.running < queue.max_running
                if can_run if queue.stopping else not queue.polling:
                    queue.dispatch()

    def _park(self, event: Event) -> bool:
        """Wait for a task. Returns False if none arrived within IDLE_TIMEOUT."""
        woken = event.wait(self._runtime.now() + IDLE_TIMEOUT)
        queue = self._queue
        with queue.lock:
            if event in queue.parked:
                queue.parked.remove(event)
            else:
                woken = True
            queue.unblocked += 1
        return woken
