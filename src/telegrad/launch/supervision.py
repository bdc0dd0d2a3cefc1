"""The processes of a group end together: this is the one loop that watches them, and stops all when one fails.

The rules:

1. When a worker fails, the others get SIGTERM. So they do when somebody asks for a stop.
2. Who has not ended after the grace, or when a second stop is asked for, gets SIGKILL with its whole process group.
3. When a worker has ended, what is left of its process group is killed: no grandchild outlives its worker.
4. When the launcher dies without a word (SIGKILL, out of memory), the kernel kills every worker's process group.

The loop runs in one thread and waits on file descriptors only: ends of processes, their output, requests to stop.
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
_PIECE = 64 * 1024
# What each request to stop passes on to the workers. A hang-up is no business of theirs: they have no terminal.
_PASSED_ON = {signal.SIGINT: signal.SIGINT, signal.SIGTERM: signal.SIGTERM, signal.SIGHUP: signal.SIGTERM}


def die_with_launcher(lifeline: int, group: int) -> None:
    """Let the kernel kill the process group `group` when the write end of the pipe `lifeline` is closed.

    The read end must stay open in the worker, and the launcher must hold the only write end, so it is closed when
    the launcher ends, however it ends. PR_SET_PDEATHSIG would need code between fork and exec, is tied to the thread
    that started the worker, and does not reach grandchildren.
    """
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, -group)
    fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)


def is_cut(lifeline: int) -> bool:
    """Return whether the launcher had already gone when `lifeline` was armed."""
    poll = select.poll()
    poll.register(lifeline, 0)
    return bool(poll.poll(0))


class Sink(Protocol):
    """Takes what a worker writes into one pipe."""

    def feed(self, piece: bytes) -> None:
        """Take the next piece."""

    def close(self) -> None:
        """Nothing more will come."""


class Worker(ABC):
    """One process of the group, leader of a process group of its own."""

    def __init__(self, name: str, rank: int, pid: int, exit_fd: int, pipes: Mapping[int, Sink]) -> None:
        self.name = name
        self.rank = rank
        self.pid = pid
        self.exitcode: int | None = None
        """None while it runs; -N if signal N ended it."""
        self.exit_fd = exit_fd
        """Readable as soon as the process has ended."""
        self.pipes = dict(pipes)

    @abstractmethod
    def read_exitcode(self) -> int:
        """Return the exit code of the process, which has ended. Called once."""

    def failed(self) -> bool:
        """Return whether the group has failed because of this worker."""
        return self.exitcode not in (None, 0)

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the process itself."""
        # It may end at any moment. Then there is nothing to signal, and its end is seen in the loop.
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill the process and its process group."""
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            self.send(signal.SIGKILL)  # It is so young that it does not lead its group yet.

    def close(self) -> None:
        """Give back what is held for the process, which has ended."""
        os.close(self.exit_fd)


class StopRequests:
    """A pipe of signal numbers: whoever wants the group to stop writes one, a signal handler as well as a thread."""

    def __init__(self) -> None:
        self._read_end, self.write_end = os.pipe()
        os.set_blocking(self._read_end, False)
        os.set_blocking(self.write_end, False)

    def stop(self) -> None:
        """Ask for a stop, as SIGTERM would."""
        os.write(self.write_end, bytes([signal.SIGTERM]))

    def fileno(self) -> int:
        """Return the end that can be waited on."""
        return self._read_end

    def read(self) -> list[signal.Signals]:
        """Return the requests that have come. Python reports every signal it handles here; the others are dropped."""
        return [signal.Signals(number) for number in os.read(self._read_end, _PIECE) if number in _PASSED_ON]

    def close(self) -> None:
        """Close both ends."""
        os.close(self._read_end)
        os.close(self.write_end)


class Supervision:
    """Watches workers until the last has ended. Whatever happens in the `with` block, none is left behind it."""

    def __init__(self, requests: StopRequests, grace: float = GRACE) -> None:
        self.failure: Worker | None = None
        """The worker that failed first, of its own accord."""
        self.asked: signal.Signals | None = None
        """The request that stopped the group, if it was stopped by one."""
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
        """Watch `worker` from now on, and end it if the block ends before it."""
        self._running.append(worker)
        self._on_readable(worker.exit_fd, partial(self._on_exit, worker))
        for pipe in worker.pipes:
            os.set_blocking(pipe, False)
            self._on_readable(pipe, partial(self._on_output, worker, pipe))

    def run(self) -> None:
        """Return when every worker has ended."""
        while self._running:
            wait = None if self._kill_at is None else max(0.0, self._kill_at - time.monotonic())
            ready = self._selector.select(wait)
            if not ready and self._kill_at is not None:
                self._kill_all()
            for key, _ in ready:
                # An earlier event of this round may have closed this descriptor.
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
                self.asked = number
                self._stop(_PASSED_ON[number])
            else:
                self._kill_all()

    def _on_exit(self, worker: Worker) -> None:
        # Until its exit code is fetched, the process is there as a zombie and no other process can have its number.
        with contextlib.suppress(ProcessLookupError):  # Nobody else is left in its group, as it should be.
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
            piece = os.read(pipe, _PIECE)
        except BlockingIOError:
            return
        if piece:
            worker.pipes[pipe].feed(piece)
        else:
            self._close_pipe(worker, pipe)
        self._check(worker)

    def _drain(self, worker: Worker, pipe: int) -> None:
        """Take what the worker has left in `pipe`, and close it."""
        # Not until its end: a grandchild in a session of its own may hold the pipe open and write for ever.
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
            self.failure = worker
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
