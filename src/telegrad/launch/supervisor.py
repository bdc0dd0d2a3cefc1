"""Supervises the processes of a group: one loop that watches all of them, and stops all when one fails.

The rules:

1. When a worker fails, or a stop is requested, the others get SIGTERM.
2. A worker that has not exited after the grace period, or when a second stop is requested, gets SIGKILL, with its whole
   process group.
3. When a worker exits, the rest of its process group is killed: no grandchild outlives its worker.
4. When the launcher is killed (SIGKILL, out of memory), the kernel kills every worker's process group.

The loop runs in one thread and waits on file descriptors only: process exits, output, and stop requests.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import selectors
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import partial
from types import TracebackType
from typing import Protocol, Self

GRACE = 5.0
_READ_SIZE = 64 * 1024
# The signal that each stop request sends to the workers. They have no terminal, so they get no hang-up.
_FORWARDED = {signal.SIGINT: signal.SIGINT, signal.SIGTERM: signal.SIGTERM, signal.SIGHUP: signal.SIGTERM}


def kill_with_launcher(lifeline: int, group: int) -> None:
    """Make the kernel kill the process group `group` when the write end of the pipe `lifeline` is closed.

    The read end must stay open in the worker. The launcher must hold the only write end, which is closed when the
    launcher exits, for whatever reason. PR_SET_PDEATHSIG would need code between fork and exec, is tied to the thread
    that started the worker, and does not reach grandchildren.
    """
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, -group)
    fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)


def launcher_is_gone(lifeline: int) -> bool:
    """Return whether the launcher exited before `kill_with_launcher` was called for `lifeline`."""
    poll = select.poll()
    poll.register(lifeline, 0)
    return bool(poll.poll(0))


class PipeConsumer(Protocol):
    """Consumes the bytes that a worker writes to one pipe."""

    def feed(self, piece: bytes) -> None:
        """Consume the next bytes."""

    def close(self) -> None:
        """Handle the end of the stream."""


class Worker(ABC):
    """One process of the group, and the leader of its own process group."""

    def __init__(self, name: str, rank: int, pid: int, exit_fd: int, pipes: Mapping[int, PipeConsumer]) -> None:
        self.name = name
        self.rank = rank
        self.pid = pid
        self.exitcode: int | None = None
        """None while it runs; -N if signal N killed it."""
        self.exit_fd = exit_fd
        """Readable once the process has exited."""
        self.pipes = dict(pipes)

    @abstractmethod
    def read_exitcode(self) -> int:
        """Return the exit code of the process. Called once, after it has exited."""

    def failed(self) -> bool:
        """Return whether this worker makes the group fail."""
        return self.exitcode not in (None, 0)

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


class StopRequests:
    """A pipe of signal numbers, to which threads and signal handlers write to stop the group."""

    def __init__(self) -> None:
        self._read_end, self.write_end = os.pipe()
        os.set_blocking(self._read_end, False)
        os.set_blocking(self.write_end, False)

    def stop(self) -> None:
        """Request a stop, like SIGTERM."""
        os.write(self.write_end, bytes([signal.SIGTERM]))

    def fileno(self) -> int:
        """Return the descriptor to wait on."""
        return self._read_end

    def read(self) -> list[signal.Signals]:
        """Return the pending requests. Python writes every signal that it handles here; other signals are dropped."""
        return [signal.Signals(number) for number in os.read(self._read_end, _READ_SIZE) if number in _FORWARDED]

    def close(self) -> None:
        """Close both ends."""
        os.close(self._read_end)
        os.close(self.write_end)


class Supervisor:
    """Watches workers until the last has exited. No worker outlives the `with` block."""

    def __init__(self, requests: StopRequests, grace: float = GRACE) -> None:
        self.first_failure: Worker | None = None
        """The worker that failed first, before the group was stopped."""
        self.stop_signal: signal.Signals | None = None
        """The requested signal that stopped the group, if one did."""
        self.stopped: list[Worker] = []
        """The workers that were still running when the group was stopped."""
        self._requests = requests
        self._grace = grace
        self._stopping = False
        self._kill_at: float | None = None
        self._running: list[Worker] = []
        self._selector = selectors.DefaultSelector()
        self._selector.register(requests, selectors.EVENT_READ, self._on_request)

    def add(self, worker: Worker) -> None:
        """Watch `worker`, and kill it if it still runs at the end of the `with` block."""
        self._running.append(worker)
        self._on_readable(worker.exit_fd, partial(self._on_exit, worker))
        for pipe in worker.pipes:
            os.set_blocking(pipe, False)
            self._on_readable(pipe, partial(self._on_output, worker, pipe))

    def run(self) -> None:
        """Return when every worker has exited."""
        while self._running:
            wait = None if self._kill_at is None else max(0.0, self._kill_at - time.monotonic())
            ready = self._selector.select(wait)
            if not ready and self._kill_at is not None:
                self._kill_all()
            for key, _ in ready:
                # An earlier event of this iteration may have closed this descriptor.
                if self._selector.get_map().get(key.fd) is key:
                    key.data()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for worker in self._running:
            if worker.exitcode is None:
                worker.kill()
        for worker in self._running:
            if worker.exitcode is None:
                worker.exitcode = worker.read_exitcode()
            for pipe in worker.pipes:
                os.close(pipe)
            worker.close()
        self._running = []
        self._selector.close()

    def _on_readable(self, descriptor: int, handler: Callable[[], None]) -> None:
        self._selector.register(descriptor, selectors.EVENT_READ, handler)

    def _on_request(self) -> None:
        for number in self._requests.read():
            if not self._stopping:
                self.stop_signal = number
                self._stop(_FORWARDED[number])
            else:
                self._kill_all()

    def _on_exit(self, worker: Worker) -> None:
        # Until its exit code is read, the process is a zombie and its pid cannot be reused.
        with contextlib.suppress(ProcessLookupError):  # Its group has no other processes.
            os.killpg(worker.pid, signal.SIGKILL)
        worker.exitcode = worker.read_exitcode()
        for pipe in list(worker.pipes):
            self._drain(worker, pipe)
        self._running.remove(worker)
        self._selector.unregister(worker.exit_fd)
        worker.close()
        self._check(worker)

    def _on_output(self, worker: Worker, pipe: int) -> None:
        try:
            piece = os.read(pipe, _READ_SIZE)
        except BlockingIOError:
            return
        if piece:
            worker.pipes[pipe].feed(piece)
        else:
            self._close_pipe(worker, pipe)
        self._check(worker)

    def _drain(self, worker: Worker, pipe: int) -> None:
        """Read the rest of `pipe` and close it."""
        # Not until end of file: a grandchild in another session may hold the pipe open and write forever.
        left = fcntl.fcntl(pipe, fcntl.F_GETPIPE_SZ)
        with contextlib.suppress(BlockingIOError):  # The pipe is empty.
            while left > 0 and (piece := os.read(pipe, left)):
                worker.pipes[pipe].feed(piece)
                left -= len(piece)
        self._close_pipe(worker, pipe)

    def _close_pipe(self, worker: Worker, pipe: int) -> None:
        self._selector.unregister(pipe)
        os.close(pipe)
        worker.pipes.pop(pipe).close()

    def _check(self, worker: Worker) -> None:
        if not self._stopping and worker.failed():
            self.first_failure = worker
            self._stop(signal.SIGTERM)

    def _stop(self, number: signal.Signals) -> None:
        self._stopping = True
        self.stopped = list(self._running)
        self._kill_at = time.monotonic() + self._grace
        for worker in self._running:
            worker.send(number)

    def _kill_all(self) -> None:
        self._kill_at = None
        for worker in self._running:
            worker.kill()
