"""Thread-local state that an executor keeps for each thread that uses it."""

from __future__ import annotations

import threading
from typing import Protocol

from telegrad.execution.task_group import TaskGroup


class HeldResource(Protocol):
    """An exclusive resource that a thread gives up while it waits."""

    def suspend(self) -> None:
        """Let other threads take the resource."""

    def resume(self) -> None:
        """Take the resource back. May wait, and raises if waiting has become pointless."""


class ThreadState(threading.local):
    """What an executor knows about the current thread."""

    held: HeldResource | None = None
    is_runner = False
    counted = False
    """Whether the thread's task counts towards the limit on running user functions."""
    group: TaskGroup | None = None
    """The group of the thread's task."""
    number = 0
    """The thread's number in `Threads`. 0 for threads that the executor did not start."""
