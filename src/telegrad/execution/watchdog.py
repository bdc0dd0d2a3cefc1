"""Starts another runner when the busy ones are slow, as Go's scheduler does."""

from __future__ import annotations

import logging

from telegrad.execution.run_queue import RunQueue
from telegrad.execution.timers import RETRY_DELAY
from telegrad.waiting import Runtime

_log = logging.getLogger("telegrad")

SLOW_TASK = 0.002  # seconds that a task may run before another runner takes over polling
MAX_BACKOFF = 2  # how many times longer the watchdog sleeps when its checks find nothing to do
IDLE_AFTER = 0.05  # seconds without a task after which the watchdog sleeps until it is woken


class Watchdog:
    """Wakes or starts a runner when tasks or the poller wait and no runner makes progress.

    No exception ends the watchdog: without it, slow functions would run one after the other.
    """

    def __init__(self, runtime: Runtime, queue: RunQueue, name: str) -> None:
        self._runtime = runtime
        self._queue = queue
        self._name = name
        self._never = runtime.event()  # never set; used to sleep when there is no memory for another event
        self._seen = -1  # `queue.started` at the last check
        self._idle_since = 0.0
        self._backoff = 1

    def run(self) -> None:
        """Check until the executor has been stopped."""
        self._idle_since = self._runtime.now()
        while True:
            try:
                if not self._check():
                    return
            except Exception:  # noqa: BLE001 - see the class
                _log.exception("worker %s: the watchdog failed and continues", self._name)
                self._never.wait(self._runtime.now() + RETRY_DELAY)

    def _check(self) -> bool:
        """Check once, and sleep until the next check is due. Returns False once the executor has been stopped."""
        queue = self._queue
        wakeup = self._runtime.event()
        idle = False
        min_sleep = 0.0
        with queue.lock:
            can_run = bool(queue.ready) and queue.running < queue.max_running
            if queue.stopping and not can_run:
                return False  # a runner that ends takes care of guaranteed tasks that are queued later
            waiting = can_run or bool(queue.urgent) or not (queue.polling or queue.stopping)
            if waiting and queue.started == self._seen:
                if queue.parked:
                    queue.parked.pop().set()
                elif not queue.start_runner():
                    min_sleep = RETRY_DELAY
            # Each check interrupts the running thread, and most checks between short tasks find nothing to do.
            self._backoff = 1 if waiting else min(2 * self._backoff, MAX_BACKOFF)
            now = self._runtime.now()
            if waiting or queue.started != self._seen:
                self._idle_since = now
            elif now - self._idle_since > IDLE_AFTER:
                queue.watchdog_wakeup, idle = wakeup, True
            self._seen = queue.started
        wakeup.wait(None if idle else now + max(min_sleep, SLOW_TASK * self._backoff))
        if idle:
            self._backoff = 1
            with queue.lock:
                queue.watchdog_wakeup = None
            self._idle_since = self._runtime.now()
        return True
