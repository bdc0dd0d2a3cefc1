"""One worker process as the supervisor sees it, however it was started."""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Protocol


def kill_with_launcher(lifeline: int, group: int) -> None:
    """Make the kernel kill the process group `group` when the write end of the pipe `lifeline` is closed.

    The read end must stay open in the worker. The launcher must hold the only write end, which is closed when the
    launcher exits, for whatever reason. PR_SET_PDEATHSIG would need code between fork and exec, is tied to the thread
    that started the worker, and does not reach grandchildren.
    """
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, -group)
    fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)


_lifelines: set[int] = set()
"""The write ends that this process holds. A forked child must not: the workers would live as long as it."""


def _close_lifelines_in_child() -> None:
    for lifeline in _lifelines:
        os.close(lifeline)
    _lifelines.clear()


os.register_at_fork(after_in_child=_close_lifelines_in_child)


def launcher_is_gone(lifeline: int) -> bool:
    """Return whether the launcher exited before `kill_with_launcher` was called for `lifeline`."""
    poll = select.poll()
    poll.register(lifeline, 0)
    return bool(poll.poll(0))


def signal_name(number: int) -> str:
    """Return the name of a signal: most real-time signals have none.

    >>> signal_name(9), signal_name(40)
    ('SIGKILL', 'signal 40')
    """
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


class PipeConsumer(Protocol):
    """Consumes the bytes that a worker writes to one pipe."""

    def feed(self, piece: bytes) -> None:
        """Consume the next bytes."""

    def close(self) -> None:
        """Handle the end of the stream."""


class Worker(ABC):
    """One process of the group, and the leader of its own process group."""

    def __init__(
        self,
        name: str,
        rank: int,
        pid: int,
        exit_fd: int,
        pipes: Mapping[int, PipeConsumer],
        lifeline: int | None = None,
    ) -> None:
        """`lifeline` is the write end of the pipe that `kill_with_launcher` is about."""
        self.name = name
        self.rank = rank
        self.pid = pid
        self.exitcode: int | None = None
        """None while it runs; -N if signal N killed it."""
        self.exit_fd = exit_fd
        """Readable once the process has exited."""
        self.pipes = dict(pipes)
        self.started = time.monotonic()
        self._lifeline = lifeline
        if lifeline is not None:
            _lifelines.add(lifeline)

    @abstractmethod
    def read_exitcode(self) -> int:
        """Return the exit code of the process. Called once, after it has exited."""

    def fatal_signal(self) -> int | None:
        """Return the signal that has killed the process, before its exit code is read; None if none has."""
        try:
            status = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:  # another process is its parent, or it has been reaped
            return None
        killed = status is not None and status.si_code in (os.CLD_KILLED, os.CLD_DUMPED)
        return status.si_status if status is not None and killed else None

    def failed(self) -> bool:
        """Return whether this worker makes the group fail."""
        return self.exitcode not in (None, 0)

    def describe_exit(self) -> str:
        """Return how this worker failed, as in "was killed by SIGKILL"."""
        code = self.exitcode or 0
        return f"failed with exit code {code}" if code >= 0 else f"was killed by {signal_name(-code)}"

    def details(self) -> str:
        """Return what else is known about the failure and nobody has printed, such as a traceback."""
        return ""

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the process."""
        # It may exit at any time. The loop notices that.
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill the process and its process group."""
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            self.send(signal.SIGKILL)  # It has just started and does not lead its group yet.

    def close(self) -> None:
        """Release the resources of the process after it has exited."""
        os.close(self.exit_fd)
        if self._lifeline is not None:
            _lifelines.discard(self._lifeline)
            os.close(self._lifeline)


class ChildWorker(Worker):
    """A worker that this process has started as its child, with a lifeline (`kill_with_launcher`)."""

    def __init__(
        self,
        name: str,
        rank: int,
        process: subprocess.Popen[bytes],
        lifeline: int,
        pipes: Mapping[int, PipeConsumer],
    ) -> None:
        super().__init__(name, rank, process.pid, os.pidfd_open(process.pid), pipes, lifeline)
        self._process = process

    def read_exitcode(self) -> int:
        """Return the exit code and reap the process."""
        return self._process.wait()
