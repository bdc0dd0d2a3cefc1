"""How tests see that processes which they did not start themselves are there, and that they are gone."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable
from pathlib import Path

DEADLINE_MS = 90_000


def wait_until(condition: Callable[[], bool]) -> None:
    """Return when `condition` holds, which no descriptor tells."""
    deadline = time.monotonic() + DEADLINE_MS / 1000
    while not condition():
        assert time.monotonic() < deadline, "it did not come true in time"
        os.sched_yield()


class Belongings:
    """The descriptors and threads that this process has now."""

    def __init__(self) -> None:
        self._before = self._count()

    def wait_until_as_before(self) -> None:
        """Return when this process has no more than these. A thread that was joined is in the list for a moment yet."""
        wait_until(lambda: all(now <= before for now, before in zip(self._count(), self._before, strict=True)))

    @staticmethod
    def _count() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


class Witness:
    """A named pipe that processes hold open for writing: its end comes when the last of them is gone.

    Unlike a look at a process id, it is not deceived by zombies and waits without polling.
    """

    def __init__(self, path: Path) -> None:
        os.mkfifo(path)
        self.path = path
        self._pipe = os.open(path, os.O_RDONLY | os.O_NONBLOCK)

    def wait_for_lines(self, count: int) -> list[str]:
        """Return the first `count` lines that the processes write."""
        text = b""
        while text.count(b"\n") < count:
            piece = self._read()
            assert piece, f"all processes ended, having written only {text!r}"
            text += piece
        return text.decode().splitlines()

    def wait_for_end(self) -> None:
        """Return when no process holds the pipe open any more."""
        while self._read():
            pass

    def _read(self) -> bytes:
        poll = select.poll()
        poll.register(self._pipe, select.POLLIN)
        assert poll.poll(DEADLINE_MS), f"nothing came, and somebody still holds {self.path}"
        return os.read(self._pipe, 65536)

    def close(self) -> None:
        os.close(self._pipe)
