"""Call a function on several workers of this machine, from a script, a notebook or a test.

The workers are forked from a server that has loaded torch, so what torch reads from the environment while it is
loaded is as it was when the first group was started. A function of an importable module is found by its name in the
worker; any other (a lambda, a function of the main script) is sent whole, and the main script is not imported again.
So a script needs no ``if __name__ == "__main__"`` guard.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, NoReturn, Self, TypeVar

import cloudpickle

from telegrad.errors import PayloadError, TelegradError, UnknownWorker
from telegrad.launch.forked import ForkedWorker, Startup, fork_worker, start_server
from telegrad.launch.meeting import Meeting, worker_names
from telegrad.launch.output import PrefixedLines, prefixes
from telegrad.launch.supervision import StopRequests, Supervision

T = TypeVar("T")


class WorkerFailed(TelegradError):
    """A worker raised, or died. What it raised is the cause, if it can be rebuilt here."""

    def __init__(
        self, message: str, *, worker: str = "", exitcode: int | None = None, remote_traceback: str = ""
    ) -> None:
        super().__init__(message)
        self.worker = worker
        self.exitcode = exitcode
        """-N if signal N ended it."""
        self.remote_traceback = remote_traceback


class GroupTimeout(TelegradError, TimeoutError):
    """Not every worker ended in time. All have been stopped."""

    def __init__(self, message: str, *, unfinished: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.unfinished = list(unfinished)


def local(
    fn: Callable[..., T],
    workers: int | Sequence[str],
    args: Sequence[Any] = (),
    *,
    prefix: bool = True,
    init: bool = True,
    timeout: float | None = None,
    init_options: Mapping[str, Any] | None = None,
) -> list[T]:
    """Call ``fn(*args)`` on every worker of a new group on this machine, and return the results in worker order.

    `workers` is a number (the names are worker0, worker1 and so on) or a list of names. Each worker calls
    ``init_rpc(name, **init_options)`` before `fn` and ``shutdown()`` after it, unless `init` is false. What they print
    appears after their names, unless `prefix` is false.

    If a worker raises or dies, the others are stopped and `WorkerFailed` names it. If not all have ended after
    `timeout` seconds, all are stopped and `GroupTimeout` names those. As with multiprocessing, a worker's atexit
    functions are not called.

    >>> local(lambda x: x + 1, workers=2, args=(41,), init=False)
    [42, 42]
    """
    with start(fn, workers, args, prefix=prefix, init=init, init_options=init_options) as group:
        return group.join(timeout)


def start(
    fn: Callable[..., Any],
    workers: int | Sequence[str],
    args: Sequence[Any] = (),
    *,
    prefix: bool = True,
    init: bool = True,
    init_options: Mapping[str, Any] | None = None,
) -> Group:
    """Start what `local` runs, and return a handle on it. Use it in a `with` statement, whose end stops the group."""
    names = worker_names(workers)
    try:
        work = cloudpickle.dumps((fn, tuple(args), dict(init_options or {})))
    except Exception as error:
        raise PayloadError(f"the function or its arguments cannot be sent to the workers: {error}") from error
    start_server()
    with contextlib.ExitStack() as held:
        requests = StopRequests()
        held.callback(requests.close)
        meeting = held.enter_context(Meeting(names))
        supervision = held.enter_context(Supervision(requests))
        started = []
        printers = [
            [PrefixedLines(text, target) if prefix else None for text in prefixes(names, target)]
            for target in (sys.stdout, sys.stderr)
        ]
        for rank, name in enumerate(names):
            startup = Startup(name, {**os.environ, **meeting.environment(rank)}, work, init)
            started.append(fork_worker(startup, rank, *(sinks[rank] for sinks in printers)))
            supervision.add(started[-1])
        return Group(started, supervision, requests, held.pop_all())


class Group:
    """The workers of one group on this machine, watched by a thread until the last has ended."""

    def __init__(
        self,
        workers: Sequence[ForkedWorker],
        supervision: Supervision,
        requests: StopRequests,
        held: contextlib.ExitStack,
    ) -> None:
        self.processes = {worker.name: worker for worker in workers}
        """Name, rank, pid and exitcode (None while it runs) of each worker, by its name."""
        self._supervision = supervision
        self._requests = requests
        self._held = held
        self._broken: BaseException | None = None
        # Protects _ended and _asked: no request may be written to a pipe that has been closed.
        self._lock = threading.Lock()
        self._ended = False
        self._asked = False
        self._watcher = threading.Thread(target=self._watch, name="telegrad-launch", daemon=True)
        # A program that ends without stopping its groups takes them with it, their directories included.
        atexit.register(self.stop)
        self._watcher.start()

    def join(self, timeout: float | None = None) -> list[Any]:
        """Wait until every worker has ended, and return their results in order: None for one that was killed by `kill`.

        Raises what `local` raises. A KeyboardInterrupt while waiting stops the group.
        """
        try:
            self._watcher.join(timeout)
        except BaseException:
            self.stop()
            raise
        if self._watcher.is_alive():
            unfinished = [worker.name for worker in self.processes.values() if worker.exitcode is None]
            self.stop()
            raise GroupTimeout(
                f"{', '.join(unfinished)} had not ended after {timeout:g} seconds; all workers were stopped",
                unfinished=unfinished,
            )
        if self._broken is not None:
            raise TelegradError(f"the group was ended, because watching it failed: {self._broken}") from self._broken
        if self._supervision.failure is not None:
            self._raise_failure()
        stopped = [w.name for w in self.processes.values() if not w.killed_on_purpose and not w.succeeded()]
        if stopped:
            raise TelegradError(f"the group was stopped before {', '.join(stopped)} had ended, so it has no results")
        return [self._result(worker) for worker in self.processes.values()]

    def kill(self, name: str) -> None:
        """Kill one worker with SIGKILL. The others go on, so that one can see what the loss does to them."""
        if name not in self.processes:
            raise UnknownWorker(f"there is no worker {name!r} in this group, only {', '.join(self.processes)}")
        worker = self.processes[name]
        if worker.exitcode is None:
            worker.killed_on_purpose = True
            worker.kill()

    def stop(self) -> None:
        """End every worker that still runs, with SIGTERM and then with SIGKILL. Nothing is left when this returns."""
        with self._lock:
            if not self._ended and not self._asked:
                self._asked = True
                self._requests.stop()
        self._watcher.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _watch(self) -> None:
        try:
            with self._held:
                try:
                    self._supervision.run()
                finally:
                    with self._lock:
                        self._ended = True
        except BaseException as error:  # noqa: BLE001 - `join` raises it, in the thread of the user
            self._broken = error
        finally:
            atexit.unregister(self.stop)

    def _result(self, worker: ForkedWorker) -> Any:
        if worker.killed_on_purpose:
            return None
        try:
            return worker.report.value()
        except Exception as error:
            raise WorkerFailed(
                f"worker {worker.name} returned a value that cannot be rebuilt here: {error}", worker=worker.name
            ) from error

    def _raise_failure(self) -> NoReturn:
        worker = self._supervision.failure
        if not isinstance(worker, ForkedWorker):
            raise TypeError(f"{worker!r} is not a worker of this group")
        if worker.report.is_error():
            raised = worker.report.raised()
            raise WorkerFailed(
                f"worker {worker.name} raised {raised.summary}\n\nThe other workers were stopped. "
                f"On {worker.name}:\n\n{raised.traceback}",
                worker=worker.name,
                exitcode=worker.exitcode,
                remote_traceback=raised.traceback,
            ) from raised.rebuild()
        code = worker.exitcode or 0
        how = f"ended with exit code {code}" if code >= 0 else f"was killed by {signal.Signals(-code).name}"
        raise WorkerFailed(
            f"worker {worker.name} {how} before its function returned; the other workers were stopped",
            worker=worker.name,
            exitcode=code,
        )
