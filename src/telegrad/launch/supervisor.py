"""Supervises the processes of a group: one loop that watches all of them, and stops all when one fails.

The rules:

1. When a worker fails for good, or a stop is requested, the others get SIGTERM. With `keep_going`, a failure does not
   stop them.
2. A worker that has not exited after the grace period, or when a second stop is requested, gets SIGKILL, with its whole
   process group.
3. When a worker exits, the rest of its process group is killed: no grandchild outlives its worker.
4. When the launcher is killed (SIGKILL, out of memory), the kernel kills every worker's process group.
5. A worker that dies by a signal, or exits with a code other than 0, is started again if the restart policy allows it
   (`telegrad.launch.restarts`). Otherwise it has failed for good. Nothing is started after a stop.
6. If several have died when the loop looks, one that a signal killed counts as the first: others fail because of it.
7. A worker is started again only after its process is reaped and its process group is gone. So at most one process of
   each name lives at any time, and the group can trust that a new one replaces the old one.

The loop runs in one thread and waits on file descriptors only: process exits, output, and stop requests.
"""

from __future__ import annotations

import contextlib
import fcntl
import heapq
import itertools
import os
import queue
import selectors
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Generic, Self, TypeVar

from telegrad.launch.process_group import kill_group, live_processes
from telegrad.launch.restarts import RestartHistory, RestartPolicy
from telegrad.launch.worker import Worker

GRACE = 5.0
_GROUP_GONE_WITHIN = 30.0
"""Seconds that a killed process group gets to end before its worker is given up. Normally it takes milliseconds."""
_GROUP_POLL = 0.01
_ANNOUNCED_DELAY = 1.0
"""A delay of so many seconds before a restart is announced, as otherwise the launcher would say nothing for long."""
_READ_SIZE = 64 * 1024
# The signal that each stop request sends to the workers. They have no terminal, so they get no hang-up.
_FORWARDED = {signal.SIGINT: signal.SIGINT, signal.SIGTERM: signal.SIGTERM, signal.SIGHUP: signal.SIGTERM}


class StopRequests:
    """A pipe of signal numbers, to which threads and signal handlers write to stop the group."""

    def __init__(self) -> None:
        self._read_end, self.write_end = os.pipe()
        os.set_blocking(self._read_end, False)
        os.set_blocking(self.write_end, False)
        # Protects _closed: nothing may be written to the number of a closed descriptor. Reentrant, because a handler of
        # a signal may stop the group at any time.
        self._lock = threading.RLock()
        self._closed = False

    def stop(self) -> None:
        """Request a stop, like SIGTERM. Does nothing after `close`."""
        self._write(bytes([signal.SIGTERM]))

    def wake(self) -> None:
        """Wake the loop that waits for requests, without one. Does nothing after `close`."""
        self._write(b"\0")

    def _write(self, request: bytes) -> None:
        # A full pipe has more requests than there are kinds of them.
        with self._lock, contextlib.suppress(BlockingIOError):
            if not self._closed:
                os.write(self.write_end, request)

    def fileno(self) -> int:
        """Return the descriptor to wait on."""
        return self._read_end

    def read(self) -> list[signal.Signals]:
        """Return the pending requests. Python writes every signal that it handles here; other signals are dropped."""
        return [signal.Signals(number) for number in os.read(self._read_end, _READ_SIZE) if number in _FORWARDED]

    def close(self) -> None:
        """Close both ends."""
        with self._lock:
            self._closed = True
            os.close(self._read_end)
            os.close(self.write_end)


class Timers:
    """Functions to call at given times, in the supervisor's loop."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()  # Functions cannot be ordered.

    def call_in(self, delay: float, function: Callable[[], None]) -> None:
        """Call `function` after `delay` seconds."""
        heapq.heappush(self._heap, (time.monotonic() + delay, next(self._numbers), function))

    def wait(self) -> float | None:
        """Return the seconds until the next call, or None if there is none."""
        return max(0.0, self._heap[0][0] - time.monotonic()) if self._heap else None

    def run_due(self) -> None:
        """Call the functions whose time has come."""
        while self._heap and self._heap[0][0] <= time.monotonic():
            heapq.heappop(self._heap)[2]()

    def run_next(self, events: queue.SimpleQueue[Callable[[], None]]) -> None:
        """Wait for an event, another function to call, or for the next call, and make the calls that are due."""
        try:
            event = events.get(timeout=self.wait())
        except queue.Empty:
            pass
        else:
            event()
        self.run_due()


W = TypeVar("W", bound=Worker)
T_co = TypeVar("T_co", covariant=True)


@dataclass(frozen=True)
class Failure(Generic[T_co]):
    """A worker that failed for good."""

    worker: T_co
    description: str
    """As in "was killed by SIGKILL (after 2 restarts within 300 s)"."""


@dataclass
class _Restarts(Generic[W]):
    """How one worker is started again, and how often it was."""

    start: Callable[[int], W]
    history: RestartHistory
    count: int = 0


class Supervisor(Generic[W]):
    """Watches workers until the last has exited. No worker outlives the `with` block.

    `report` is called with a sentence about each worker that is started again, or that fails while others continue.
    """

    def __init__(
        self,
        requests: StopRequests,
        grace: float = GRACE,
        policy: RestartPolicy | None = None,
        *,
        keep_going: bool = False,
        report: Callable[[str], None] = lambda sentence: None,
    ) -> None:
        self.failures: list[Failure[W]] = []
        """The workers that failed for good before the group was stopped, in order: at most one without `keep_going`."""
        self.stop_signal: signal.Signals | None = None
        """The requested signal that stopped the group, if one did."""
        self.stopped: list[W] = []
        """The workers that were still running when the group was stopped."""
        self.to_restart: set[str] = set()
        """The names of the workers that died and are not started again yet."""
        self._requests = requests
        self._grace = grace
        self._policy = policy or RestartPolicy()
        self.keep_going = keep_going
        self._report = report
        self._stopping = False
        self._timers = Timers()
        self._running: list[W] = []
        self._ending: list[W] = []  # They have failed, but not exited yet.
        self._restarts: dict[str, _Restarts[W]] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(requests, selectors.EVENT_READ, self._on_request)

    def start(self, name: str, start: Callable[[int], W]) -> None:
        """Start the worker with ``start(0)``, and after its n-th death with ``start(n)``, as far as the policy allows.

        A worker that still runs at the end of the `with` block is killed.
        """
        self._restarts[name] = _Restarts(start, RestartHistory(self._policy))
        self._add(start(0))

    def run(self) -> None:
        """Return when every worker has exited and none is to be started again."""
        while self._running or self.to_restart:
            for key, _ in self._selector.select(self._timers.wait()):
                # An earlier event of this iteration may have closed this descriptor.
                if self._selector.get_map().get(key.fd) is key:
                    key.data()
            self._timers.run_due()

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

    def _add(self, worker: W) -> None:
        self._running.append(worker)
        self._on_readable(worker.exit_fd, partial(self._on_exit, worker))
        for pipe in worker.pipes:
            os.set_blocking(pipe, False)
            self._on_readable(pipe, partial(self._on_output, worker, pipe))

    def _on_readable(self, descriptor: int, handler: Callable[[], None]) -> None:
        self._selector.register(descriptor, selectors.EVENT_READ, handler)

    def _on_request(self) -> None:
        for number in self._requests.read():
            if not self._stopping:
                self.stop_signal = number
                self._stop(_FORWARDED[number])
            else:
                self._kill_all()

    # -- output -----------------------------------------------------------------------------------------------

    def _on_output(self, worker: W, pipe: int) -> None:
        try:
            piece = os.read(pipe, _READ_SIZE)
        except BlockingIOError:
            return
        if piece:
            worker.pipes[pipe].feed(piece)
        else:
            self._close_pipe(worker, pipe)
        if worker.failed() and not self._stopping:
            self._on_error_result(worker)

    def _drain(self, worker: W, pipe: int) -> None:
        """Read the rest of `pipe` and close it."""
        # Not until end of file: a grandchild in another session may hold the pipe open and write forever.
        left = fcntl.fcntl(pipe, fcntl.F_GETPIPE_SZ)
        with contextlib.suppress(BlockingIOError):  # The pipe is empty.
            while left > 0 and (piece := os.read(pipe, left)):
                worker.pipes[pipe].feed(piece)
                left -= len(piece)
        self._close_pipe(worker, pipe)

    def _close_pipe(self, worker: W, pipe: int) -> None:
        self._selector.unregister(pipe)
        os.close(pipe)
        worker.pipes.pop(pipe).close()

    # -- the end of a worker ----------------------------------------------------------------------------------

    def _on_error_result(self, worker: W) -> None:
        """Handle a failure that is known before the process has exited."""
        if self._policy.limit == 0 and not self.keep_going:
            self._fail(worker, worker.describe_exit())
        elif worker not in self._ending:
            self._ending.append(worker)
            self._timers.call_in(self._grace, partial(self._kill_if_running, worker))

    def _on_exit(self, worker: W) -> None:
        if worker.fatal_signal() is None:
            # Others may have been killed before, and this one have failed because of that.
            for other in [one for one in self._running if one is not worker and one.fatal_signal() is not None]:
                if other.exit_fd in self._selector.get_map():
                    self._on_exit(other)
        self._selector.unregister(worker.exit_fd)
        self._end(worker, time.monotonic() + _GROUP_GONE_WITHIN)

    def _end(self, worker: W, deadline: float) -> None:
        """Kill the rest of the worker's process group and reap the worker. If it may start again, wait for the group.

        Until its exit code is read, a process is a zombie, and its pid, the number of its group too, is not reused.
        """
        kill_group(worker.pid)
        alive: Sequence[int] = ()
        if self._policy.limit > 0 and not self._stopping:
            alive = live_processes(worker.pid)
            if alive and time.monotonic() < deadline:
                self._timers.call_in(_GROUP_POLL, partial(self._end, worker, deadline))
                return
        worker.exitcode = worker.read_exitcode()
        for pipe in list(worker.pipes):
            self._drain(worker, pipe)
        self._running.remove(worker)
        worker.close()
        if not self._stopping:
            self._restart_or_fail(worker, alive)

    def _restart_or_fail(self, worker: W, alive: Sequence[int]) -> None:
        what = worker.describe_exit()
        if alive:
            numbers = ", ".join(map(str, alive))
            self._fail(worker, f"{what}, and processes that it had started cannot be killed ({numbers})")
        elif worker.exitcode != 0 and self._policy.limit > 0:
            if not self._restart(worker, what, worker.started) and worker.failed():
                self._fail(worker, f"{what} ({self._after_restarts()})")
        elif worker.failed():
            self._fail(worker, what)

    def _restart(self, worker: W, what: str, started: float) -> bool:
        """Start the worker again after a delay. Return False if the policy does not allow it."""
        restarts = self._restarts[worker.name]
        restart = restarts.history.next(started, time.monotonic())
        if restart is None:
            return False
        restarts.count += 1
        self.to_restart.add(worker.name)
        if restart.delay >= _ANNOUNCED_DELAY:
            self._report(f"{worker.name} {what}; it is started again in {restart.delay:g} s")
        limit, window = self._policy.limit, self._policy.window
        done = f"{what}; started again ({restart.used} of {limit} restart{_s(limit)} within {window:g} s)"
        self._timers.call_in(restart.delay, partial(self._start_again, worker, restarts.count, done))
        return True

    def _start_again(self, worker: W, count: int, done: str) -> None:
        if self._stopping:
            return
        try:
            again = self._restarts[worker.name].start(count)
        except (OSError, EOFError, MemoryError) as error:  # a shortage, or the server of forked workers ended
            self.to_restart.remove(worker.name)
            what = f"{worker.describe_exit()} and could not be started again: {error or type(error).__name__}"
            if not self._restart(worker, what, time.monotonic()):
                self._fail(worker, f"{what} ({self._after_restarts()})")
            return
        self._add(again)
        self.to_restart.remove(worker.name)
        self._report_failure(worker, done)

    def _after_restarts(self) -> str:
        limit, window = self._policy.limit, self._policy.window
        return f"after {limit} restart{_s(limit)} within {window:g} s"

    def _fail(self, worker: W, description: str) -> None:
        self.failures.append(Failure(worker, description))
        if not self.keep_going:
            self._stop(signal.SIGTERM)
        elif self._running or self.to_restart:
            self._report_failure(worker, f"{description}; the other workers continue")

    def _report_failure(self, worker: W, sentence: str) -> None:
        details = worker.details()
        self._report(f"{worker.name} {sentence}" + (f"\n{details}" if details else ""))

    # -- the end of the group ---------------------------------------------------------------------------------

    def _stop(self, number: signal.Signals) -> None:
        self._stopping = True
        self.to_restart.clear()
        self.stopped = list(self._running)
        self._timers.call_in(self._grace, self._kill_all)
        for worker in self._running:
            worker.send(number)

    def _kill_all(self) -> None:
        for worker in self._running:
            worker.kill()

    def _kill_if_running(self, worker: W) -> None:
        if worker in self._running:
            worker.kill()


def _s(count: int) -> str:
    return "" if count == 1 else "s"
