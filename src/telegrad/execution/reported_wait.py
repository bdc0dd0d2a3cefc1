"""A wait that is reported in the log if it lasts: after some seconds, and then ever more rarely."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType

from telegrad.execution.executor import Executor
from telegrad.execution.timers import Timer
from telegrad.waiting import Runtime
from telegrad.waiting_report import WaitingReport


class ReportedWait:
    """Calls `report` with the seconds waited so far, whenever they are to be reported until the block ends.

    `report` runs on a runner, and must be short. Several waits that are one for the user share a `schedule`.
    """

    def __init__(
        self,
        runtime: Runtime,
        executor: Executor,
        report: Callable[[float], None],
        schedule: WaitingReport | None = None,
    ) -> None:
        self._now = runtime.now
        self._timers = executor.timers
        self._report = report
        self._schedule = schedule or WaitingReport(runtime.now())
        self._lock = threading.Lock()  # protects the two below
        self._timer: Timer | None = None
        self.over = False
        """Whether the wait has ended, so that a report that took long is not worth logging."""

    def __enter__(self) -> ReportedWait:
        self._timer = self._timers.at(self._schedule.due, self._look)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._lock:
            self.over = True
            timer, self._timer = self._timer, None
        if timer is not None:
            self._timers.cancel(timer)

    def _look(self) -> None:
        now = self._now()
        with self._lock:
            if self.over:
                return
            is_due = self._schedule.is_due(now)
            self._timer = self._timers.at(self._schedule.due, self._look)
        if is_due:
            self._report(self._schedule.elapsed(now))
