"""The tasks that wait for a runner, and the state of the runners that could take them.

Executor, runner loop, timers and watchdog share one `RunQueue` and its lock. `dispatch` upholds the executor's rule:
at any time some runner that is not blocked either polls or will look for tasks and poll next.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable

from telegrad.execution.threads import Threads
from telegrad.transport.base import Poller
from telegrad.waiting import Event

_log = logging.getLogger("telegrad")

Task = Callable[[], object]


class RunQueue:
    """Queued tasks and the state of the runners."""

    def __init__(
        self,
        lock: threading.Lock,
        poller: Poller,
        threads: Threads,
        run: Callable[[int], None],
        *,
        name: str,
        max_running: int,
    ) -> None:
        self._poller = poller
        self._threads = threads
        self._run = run
        self._name = name
        self.lock = lock  # protects all attributes below
        self.max_running = max_running
        self.urgent: deque[Task] = deque()
        """Short tasks, which run even when `max_running` user functions are running."""
        self.ready: deque[Task] = deque()
        """User functions."""
        self.polling = False
        """Whether a thread waits in the poller."""
        self.parked: list[Event] = []
        """One event for each idle runner. Setting it makes the runner look for tasks."""
        self.unblocked = 0
        """Runners that are neither parked nor waiting."""
        self.running = 0
        """Runners that run a user function and do not wait in it."""
        self.started = 0
        """How often runners looked for a task. The watchdog uses it to detect progress."""
        self.stopping = False
        self.watchdog_wakeup: Event | None = None
        """Set it to wake the watchdog. None while the watchdog is awake."""
        self.start_failure: Exception | None = None
        """Why the last runner could not be started. None if it was."""

    def wake_watchdog(self) -> None:
        """Have the watchdog check whether the busy runners are slow. Call with the lock held."""
        if self.watchdog_wakeup is not None:
            self.watchdog_wakeup.set()

    def dispatch(self) -> None:
        """Make sure that a runner looks for tasks now. Call with the lock held."""
        if self.polling:
            self._poller.wake()
        elif self.parked:
            self.parked.pop().set()
        elif not self.unblocked:
            self.start_runner()
        else:
            self.wake_watchdog()  # a busy runner looks for tasks when it is done, or the watchdog starts another

    def start_runner(self) -> bool:
        """Start a runner. Returns False if the system has no thread for it. Call with the lock held.

        After a failure the watchdog tries again.
        """
        number = self._threads.reserve()
        self.unblocked += 1
        # Starting a thread waits until it runs, so the lock is not held meanwhile.
        self.lock.release()
        failure: Exception | None = None
        launched = False
        try:
            self._threads.launch(number, "runner", lambda: self._run(number))
            launched = True
        except Exception as error:  # noqa: BLE001 - the task that runs here must not fail because another has to wait
            failure = error
        finally:
            self.lock.acquire()
            if not launched:
                self.unblocked -= 1
                self._threads.discard(number)
        if not launched:
            if self.start_failure is None:  # log once per shortage
                _log.warning("worker %s: a task waits because no thread can be started: %s", self._name, failure)
            self.start_failure = failure
            self.wake_watchdog()
            return False
        self.start_failure = None
        return True
