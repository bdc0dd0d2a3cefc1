"""Runs a function on several workers of this machine, from a script, a notebook or a test.

The workers are forked from a server that has loaded torch. Environment variables that torch reads while it loads
therefore have the values from when the first group was started. Workers import a function of an importable module by
name. Any other function (a lambda, a function of the main script) is sent by value, and the main script is not imported
again. So a script needs no ``if __name__ == "__main__"`` guard.
"""

from __future__ import annotations

import atexit
import contextlib
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any, NoReturn, Self, TypeVar

import cloudpickle

from telegrad.errors import PayloadError, TelegradError, UnknownWorker
from telegrad.launch.forked import ForkedWorker, Startup, fork_worker, interpreter_state, start_server
from telegrad.launch.local_rendezvous import RESTART_VARIABLE, LocalRendezvous, worker_names
from telegrad.launch.output import PrefixedLines, prefixes
from telegrad.launch.restarts import WINDOW, RestartPolicy
from telegrad.launch.supervisor import GRACE, Failure, StopRequests, Supervisor

T = TypeVar("T")


class WorkerFailed(TelegradError):
    """A worker raised an exception or died. The exception is the cause, if it can be unpickled here."""

    def __init__(
        self,
        message: str,
        *,
        worker: str = "",
        exitcode: int | None = None,
        remote_traceback: str = "",
        results: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.worker = worker
        self.exitcode = exitcode
        """-N if signal N killed the worker."""
        self.remote_traceback = remote_traceback
        self.results = dict(results or {})
        """With `keep_going`: the results of the workers that finished, by name, if they can be unpickled here."""


class GroupTimeout(TelegradError, TimeoutError):
    """Not every worker finished in time. All have been stopped."""

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
    devices_per_worker: int | None = None,
    restart: int = 0,
    restart_window: float = WINDOW,
    keep_going: bool = False,
) -> list[T]:
    """Call ``fn(*args)`` on every worker of a new group on this machine, and return the results in worker order.

    `workers` is a number (the names are worker0, worker1 and so on) or a list of names. Each worker calls
    ``init_rpc(name, **init_options)`` before `fn` and ``shutdown()`` after it, unless `init` is false. Their output is
    printed with their names as prefixes, unless `prefix` is false. `devices_per_worker` assigns so many accelerators to
    each worker, which finds them with `telegrad.rpc.devices`.

    If a worker raises or dies, it is started again, at most `restart` times within `restart_window` seconds, with a
    message on stderr. The result of its last start counts. A worker that may not be started again has failed: the
    others are stopped and `WorkerFailed` names it. With `keep_going` they are not stopped, and `WorkerFailed` is raised
    when they have finished. If some have not finished after `timeout` seconds, all are stopped and `GroupTimeout` names
    the unfinished ones. As with multiprocessing, a worker's atexit functions are not called.

    >>> local(lambda x: x + 1, workers=2, args=(41,), init=False)
    [42, 42]
    """
    with start(
        fn,
        workers,
        args,
        prefix=prefix,
        init=init,
        init_options=init_options,
        devices_per_worker=devices_per_worker,
        restart=restart,
        restart_window=restart_window,
        keep_going=keep_going,
    ) as group:
        return group.join(timeout)


def start(
    fn: Callable[..., Any],
    workers: int | Sequence[str],
    args: Sequence[Any] = (),
    *,
    prefix: bool = True,
    init: bool = True,
    init_options: Mapping[str, Any] | None = None,
    devices_per_worker: int | None = None,
    restart: int = 0,
    restart_window: float = WINDOW,
    keep_going: bool = False,
) -> Group:
    """Start a group like `local`, without waiting for it. Use the group in a `with` statement, which stops it."""
    names = worker_names(workers)
    policy = RestartPolicy(restart, restart_window)
    try:
        work = cloudpickle.dumps((fn, tuple(args), dict(init_options or {})))
    except Exception as error:
        raise PayloadError(
            f"cannot pickle the function or its arguments to send them to the workers: {error}"
        ) from error
    start_server()
    with contextlib.ExitStack() as resources:
        requests = StopRequests()
        resources.callback(requests.close)
        rendezvous = resources.enter_context(
            LocalRendezvous(names, devices_per_worker, outlives_workers=keep_going or restart > 0)
        )
        supervisor = resources.enter_context(Supervisor(requests, GRACE, policy, keep_going=keep_going, report=_report))
        printers = [
            [PrefixedLines(text, target) if prefix else None for text in prefixes(names, target)]
            for target in (sys.stdout, sys.stderr)
        ]
        processes: dict[str, ForkedWorker] = {}
        # Once for all starts: a worker that is started again finds what the first one found.
        environments = [rendezvous.environment(rank) for rank in range(len(names))]
        interpreter = interpreter_state()

        def start_worker(rank: int, restart: int) -> ForkedWorker:
            environment = {**environments[rank], RESTART_VARIABLE: str(restart)}
            startup = Startup(names[rank], environment, work, init)
            outputs = [by_rank[rank] for by_rank in printers]
            worker = fork_worker(startup, interpreter, rank, rendezvous.token_descriptor, *outputs)
            processes[worker.name] = worker
            return worker

        for rank, name in enumerate(names):
            supervisor.start(name, partial(start_worker, rank))
        return Group(processes, supervisor, requests, resources.pop_all())


def _report(sentence: str) -> None:
    print(f"telegrad launch: {sentence}", file=sys.stderr, flush=True)


class Group:
    """The workers of one group on this machine, supervised by a thread until the last has exited."""

    def __init__(
        self,
        processes: Mapping[str, ForkedWorker],
        supervisor: Supervisor,
        requests: StopRequests,
        resources: contextlib.ExitStack,
    ) -> None:
        self.processes = processes
        """Name, rank, pid and exitcode (None while it runs) of the last start of each worker, by name."""
        self._supervisor = supervisor
        self._requests = requests
        self._resources = resources
        self._supervisor_error: BaseException | None = None
        # Protects _ended and _stop_requested: nothing may be written to the pipe of requests after it is closed.
        self._lock = threading.Lock()
        self._ended = False
        self._stop_requested = False
        self._thread = threading.Thread(target=self._supervise, name="telegrad-launch", daemon=True)
        # A program that exits without stopping its groups stops them here and removes their directories.
        atexit.register(self.stop)
        self._thread.start()

    def join(self, timeout: float | None = None) -> list[Any]:
        """Wait until every worker has exited, and return their results in order: None for a worker killed by `kill`.

        Raises the same errors as `local`. A KeyboardInterrupt while waiting stops the group.
        """
        try:
            self._thread.join(timeout)
        except BaseException:
            self.stop()
            raise
        if self._thread.is_alive():
            unfinished = self._unfinished()
            self.stop()
            raise GroupTimeout(
                f"{', '.join(unfinished)} did not finish within {timeout:g} seconds; all workers were stopped",
                unfinished=unfinished,
            )
        if self._supervisor_error is not None:
            raise TelegradError(
                f"the group was stopped because its supervisor failed: {self._supervisor_error}"
            ) from self._supervisor_error
        if self._supervisor.stop_signal is None and self._supervisor.failures:
            self._raise_failure(self._supervisor.failures)
        stopped = [w.name for w in self.processes.values() if not w.killed_on_purpose and not w.succeeded()]
        if stopped:
            raise TelegradError(f"the group was stopped before {', '.join(stopped)} finished, so it has no results")
        return [self._result(worker) for worker in self.processes.values()]

    def kill(self, name: str) -> None:
        """Kill one worker with SIGKILL. The others continue, to test how they handle the loss.

        It is started again if `restart` allows it. Otherwise its result is None. Does nothing if it does not run.
        """
        if name not in self.processes:
            raise UnknownWorker(f"this group has no worker {name!r}; its workers are {', '.join(self.processes)}")
        worker = self.processes[name]
        if worker.exitcode is None:
            worker.killed_on_purpose = True
            worker.kill()

    def stop(self) -> None:
        """Stop every running worker with SIGTERM, then SIGKILL. No process is left when this returns."""
        with self._lock:
            if not self._ended and not self._stop_requested:
                self._stop_requested = True
                self._requests.stop()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _supervise(self) -> None:
        try:
            with self._resources:
                try:
                    self._supervisor.run()
                finally:
                    with self._lock:
                        self._ended = True
        except BaseException as error:  # noqa: BLE001 - `join` raises it in the user's thread
            self._supervisor_error = error
        finally:
            atexit.unregister(self.stop)

    def _result(self, worker: ForkedWorker) -> Any:
        if worker.killed_on_purpose:
            return None
        try:
            return worker.result.value()
        except Exception as error:
            raise WorkerFailed(
                f"worker {worker.name} returned a value that cannot be unpickled here: {error}", worker=worker.name
            ) from error

    def _unfinished(self) -> list[str]:
        # In this order: a worker that is started again leaves the set after it has a new process.
        to_restart = set(self._supervisor.to_restart)
        failed = {failure.worker.name for failure in self._supervisor.failures}
        return [
            worker.name
            for worker in self.processes.values()
            if worker.exitcode is None
            or worker.name in to_restart
            or not (worker.succeeded() or worker.killed_on_purpose or worker.name in failed)
        ]

    def _results(self) -> dict[str, Any]:
        """Return the results of the workers that finished, without those that cannot be unpickled here."""
        results = {}
        for worker in self.processes.values():
            if worker.succeeded():
                with contextlib.suppress(WorkerFailed):
                    results[worker.name] = self._result(worker)
        return results

    def _raise_failure(self, failures: Sequence[Failure]) -> NoReturn:
        worker, description = failures[0].worker, failures[0].description
        if not isinstance(worker, ForkedWorker):
            raise TypeError(f"{worker!r} is not a worker of this group")
        others = "the other workers were stopped"
        if self._supervisor.keep_going:
            also = [f"{failure.worker.name} {failure.description}" for failure in failures[1:]]
            others = "; ".join([*also, "the other workers finished"])
        raised = worker.result.raised() if worker.result.is_error() else None
        trace = raised.traceback if raised is not None else ""
        raise WorkerFailed(
            f"worker {worker.name} {description}; {others}" + (f"\n\nOn {worker.name}:\n\n{trace}" if trace else ""),
            worker=worker.name,
            exitcode=worker.exitcode,
            remote_traceback=trace,
            results=self._results() if self._supervisor.keep_going else {},
        ) from (raised.unpickle() if raised is not None else None)
