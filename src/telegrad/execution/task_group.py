"""Tasks of which only a number may run at the same time, such as the functions that one peer calls.

The executor's queue never contains more tasks of a group than may still start. The others wait in the group, so they do
not delay the tasks of others. A task that waits, for the reply to a nested call for example, does not count meanwhile:
otherwise workers that call each other could wait for each other for ever.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable


class TaskGroup:
    """The tasks of one group. The lock of the executor protects all attributes."""

    __slots__ = ("max_running", "queued", "running", "waiting")

    def __init__(self, max_running: float) -> None:
        self.max_running = max_running
        self.running = 0
        """Tasks that run and do not wait."""
        self.queued = 0
        """Tasks in the queue of the executor."""
        self.waiting: deque[Callable[[], object]] = deque()
        """Tasks that may not start yet."""

    def may_start(self) -> bool:
        """Return whether another task may be put into the queue of the executor."""
        return self.running + self.queued < self.max_running
