"""Deadlines of calls that no thread waits for.

Nearly all calls of a program have the same timeout, so their deadlines are in the order in which the calls are made,
and nearly all calls end long before. So they are in a queue with one timer for the first. When a call ends, nothing has
to be cancelled: the queue drops it with the next call, or at its deadline. A call whose deadline is earlier than that
of a call before it gets its own timer.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from functools import partial

from telegrad.calls.call import Call
from telegrad.execution.executor import Executor
from telegrad.execution.timers import Timer
from telegrad.waiting import Runtime

_AMPLE = 256  # length of the queue from which on calls that have ended are looked for


class Deadlines:
    """Calls `expire`, on a worker thread, with every call that is still in flight at its deadline."""

    def __init__(self, runtime: Runtime, executor: Executor, expire: Callable[[Call], object]) -> None:
        self._now = runtime.now
        self._executor = executor
        self._expire = expire
        self._lock = threading.Lock()  # protects what follows
        self._queue: deque[Call] = deque()  # by deadline
        self._timer: Timer | None = None  # for the first of the queue, or earlier
        self._ample = _AMPLE

    def add(self, call: Call, deadline: float) -> None:
        """Expire `call` at its deadline, unless it has ended before."""
        forgotten: list[Call] = []  # until the lock is free: what dies with a call may run user code
        with self._lock:
            queue = self._queue
            while queue and (queue[0].answer is not None or queue[0].error is not None):
                forgotten.append(queue.popleft())
            if not queue or deadline >= (queue[-1].deadline or 0.0):
                queue.append(call)
                if len(queue) > self._ample:
                    forgotten.extend(queue)
                    self._queue = deque([each for each in queue if not each.done()])  # a long call hid the others
                    self._ample = max(_AMPLE, 2 * len(self._queue))
                if self._timer is None or self._timer.action is None or deadline < self._timer.when:
                    if self._timer is not None:
                        self._executor.timers.cancel(self._timer)
                    first = self._queue[0].deadline if self._queue else deadline
                    self._timer = self._executor.timers.at(first or 0.0, self._look)
                return
        call.timer = self._executor.timers.at(deadline, partial(self._expire, call))
        if call.done():
            self._executor.timers.cancel(call.timer)

    def _look(self) -> None:
        now = self._now()
        passed: list[Call] = []
        try:
            with self._lock:
                queue = self._queue
                while queue and (queue[0].done() or (queue[0].deadline or 0.0) <= now):
                    passed.append(queue.popleft())
                if self._timer is None or self._timer.action is None:  # else an earlier one was set meanwhile
                    self._timer = self._executor.timers.at(queue[0].deadline or 0.0, self._look) if queue else None
        finally:  # also if there is no memory for the next timer
            for call in passed:
                if not call.done():
                    # One task each: what one raises must not keep the others from ending.
                    self._executor.submit(partial(self._expire, call), urgent=True)

    def waiting(self) -> int:
        """Return the length of the queue, with calls that have ended; for tests."""
        return len(self._queue)
