"""Helpers to wait for processes that a test did not start itself, and to find leaked descriptors and threads."""

from __future__ import annotations

import os
import re
import select
import time
from collections.abc import Callable
from pathlib import Path

DEADLINE_MS = 90_000
_REPORT = re.compile(r"^.*worker .* has waited [\d.]+ \w+ (?:in|for) .*\n", re.MULTILINE)


def wait_until(condition: Callable[[], bool]) -> None:
    """Poll until `condition` holds. For conditions that no file descriptor signals."""
    deadline = time.monotonic() + DEADLINE_MS / 1000
    while not condition():
        assert time.monotonic() < deadline, "the condition did not become true in time"
        os.sched_yield()


_KINETO = re.compile(r"^.*(?:USDT:\d|ERROR: External init callback must run in same thread).*\n", re.MULTILINE)
"""What torch's profiler writes; see docs/profiling.md."""


def unexpected_errors(stderr: str) -> str:
    """Return what workers wrote to stderr, without reports that one waited for another: a busy machine causes these.

    Nor with what torch's profiler writes.
    """
    return _KINETO.sub("", _REPORT.sub("", stderr))


class ResourceSnapshot:
    """The number of descriptors and threads of this process at some time."""

    def __init__(self) -> None:
        self._before = self._count()

    def wait_until_restored(self) -> None:
        """Wait until this process has no more than these. A joined thread stays in the list for a moment."""
        wait_until(lambda: all(now <= before for now, before in zip(self._count(), self._before, strict=True)))

    @staticmethod
    def _count() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


class LivenessPipe:
    """A named pipe that processes hold open for writing. It reaches end of file when the last of them is gone.

    Unlike checking process ids, this is not fooled by zombies and needs no polling.
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
            assert piece, f"all processes exited after writing only {text!r}"
            text += piece
        return text.decode().splitlines()

    def wait_for_end(self) -> None:
        """Return when no process holds the pipe open."""
        while self._read():
            pass

    def _read(self) -> bytes:
        poll = select.poll()
        poll.register(self._pipe, select.POLLIN)
        assert poll.poll(DEADLINE_MS), f"no output, and some process still holds {self.path}"
        return os.read(self._pipe, 65536)

    def close(self) -> None:
        os.close(self._pipe)
