"""A group that a thread of this process supervises: what `join`, `stop` and the end mean, the same for every engine.

An engine derives its group from `SupervisedGroup`, says how its supervisor runs and is asked to stop, and calls `begin`
when all is ready. The rules of `telegrad.launch.base` about results and errors are carried out here:

1. A failure is raised before anything else that `join` could say, unless somebody has stopped the group.
2. Then come the workers that a stop did not let finish. Then the results, in order.
3. An interrupt of `join` or `stop` stops the group, and a second one kills it. Both wait for its end, which a killed
   group reaches soon. A third one does not wait.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Generic, NoReturn, Protocol, TypeVar

from telegrad.errors import TelegradError
from telegrad.launch.base import Group, WorkerFailed, failed, stopped_early, timed_out
from telegrad.launch.supervisor import Failure
from telegrad.launch.worker_result import RaisedException


class Result(Protocol):
    """What a worker's function returned or raised, as far as it is known."""

    def is_error(self) -> bool:
        """Return whether it raised."""

    def value(self) -> Any:
        """Return the value that it returned."""

    def raised(self) -> RaisedException:
        """Return the exception that it raised."""


class SupervisedWorker(Protocol):
    """The last start of one worker, as its group sees it."""

    @property
    def name(self) -> str:
        """The name of the worker."""

    @property
    def exitcode(self) -> int | None:
        """-N if signal N killed it; None while it runs, or if the engine does not know."""

    @property
    def killed_on_purpose(self) -> bool:
        """Whether `Group.kill` ended it."""

    @property
    def ended(self) -> bool:
        """Whether its process is gone."""

    @property
    def result(self) -> Result:
        """What its function returned or raised."""

    def succeeded(self) -> bool:
        """Return whether its function returned."""


W = TypeVar("W", bound=SupervisedWorker)


class SupervisedGroup(Group, Generic[W]):
    """The workers of one group, supervised by a thread until the last has ended."""

    keep_going = False
    """Whether the others go on when a worker fails."""

    def __init__(self, workers: Mapping[str, W]) -> None:
        """Make a group of workers by name. The mapping may change: it has the last start of each."""
        self.processes = workers
        """The last start of each worker, by name."""
        self._supervisor_error: BaseException | None = None
        self._process = os.getpid()
        self._lock = threading.Lock()  # protects _stop_requested
        self._stop_requested = False
        # Set when the thread ends. Not Thread.join: after one that a signal interrupts, Python 3.11 takes the thread
        # for finished, and the next one returns at once.
        self._done = threading.Event()

    def begin(self, thread: str = "telegrad-launch") -> None:
        """Start the thread that supervises the workers."""
        # A program that exits without stopping its groups stops them here and removes their directories.
        atexit.register(self.stop)
        threading.Thread(target=self._supervise, name=thread, daemon=True).start()

    # -- what an engine does --------------------------------------------------------------------------------------

    @abstractmethod
    def _run(self) -> None:
        """Supervise the workers until the last has ended, and release what the group holds."""

    @abstractmethod
    def _request_stop(self) -> None:
        """Ask the supervisor to stop all workers. A second request kills them. Nothing happens after the end."""

    @abstractmethod
    def _failures(self) -> Sequence[Failure[W | None]]:
        """Return which workers have failed, the cause first, or None for the engine itself.

        Nothing if the group has not failed, or was stopped before.
        """

    def _to_restart(self) -> set[str]:
        """Return the workers that ended and will be started again."""
        return set()

    # -- what users do ------------------------------------------------------------------------------------------

    @property
    def names(self) -> Sequence[str]:
        """The names of the workers, in order."""
        return list(self.processes)

    def join(self, timeout: float | None = None) -> list[Any]:
        """Wait until every worker has ended, and return their results in order; see `Group.join`.

        A KeyboardInterrupt while waiting stops the group.
        """
        self.wait(timeout)
        if not self._done.is_set():
            unfinished = self._unfinished()
            self.stop()
            raise timed_out(unfinished, timeout or 0.0)
        self.check_supervisor()
        if failures := self._failures():
            self._raise_failure(failures)
        workers = self.processes.values()
        if stopped := [one.name for one in workers if not one.killed_on_purpose and not one.succeeded()]:
            raise stopped_early(stopped)
        return [_value(worker) for worker in workers]

    def stop(self) -> None:
        """Stop every running worker with SIGTERM, then SIGKILL. None is left when this returns.

        Does nothing in a process that was forked from the one that started the group: that one goes on with it.
        """
        if os.getpid() != self._process:
            return
        with self._lock:
            first, self._stop_requested = not self._stop_requested, True
        if first:
            self._request_stop()
        try:
            self._done.wait()
        except BaseException:
            self._request_stop()
            self._done.wait()
            raise

    def wait(self, timeout: float | None = None) -> None:
        """Wait until the group is over, or for `timeout` seconds. An interrupt stops it."""
        if os.getpid() != self._process:  # where nobody supervises it
            raise TelegradError(f"only process {self._process}, which has started this group, can wait for it")
        try:
            self._done.wait(timeout)
        except BaseException:
            self.stop()
            raise

    def check_supervisor(self) -> None:
        """Raise a TelegradError if the supervisor failed, as when the output of workers cannot be written."""
        if self._supervisor_error is not None:
            raise TelegradError(
                f"the group was stopped because its supervisor failed: {self._supervisor_error}"
            ) from self._supervisor_error

    # -- inside -------------------------------------------------------------------------------------------------

    def _supervise(self) -> None:
        try:
            self._run()
        except BaseException as error:  # noqa: BLE001 - `join` raises it in the user's thread
            self._supervisor_error = error
        finally:
            atexit.unregister(self.stop)
            self._done.set()

    def _unfinished(self) -> list[str]:
        # In this order: a worker that is started again leaves the set after it has a new process.
        to_restart = self._to_restart()
        failed = {failure.worker.name for failure in self._failures() if failure.worker is not None}
        return [
            worker.name
            for worker in self.processes.values()
            if worker.name in to_restart
            or not (worker.succeeded() or worker.name in failed or (worker.killed_on_purpose and worker.ended))
        ]

    def _raise_failure(self, failures: Sequence[Failure[W | None]]) -> NoReturn:
        worker, description = failures[0].worker, failures[0].description
        if worker is None:
            raise WorkerFailed(f"{description}; all workers were stopped")
        others = "the other workers were stopped"
        if self.keep_going:
            also = [f"{one.worker.name} {one.description}" for one in failures[1:] if one.worker is not None]
            others = "; ".join([*also, "the other workers finished"])
        raised = worker.result.raised() if worker.result.is_error() else None
        raise failed(
            worker.name,
            description,
            others=others,
            exitcode=worker.exitcode,
            remote_traceback="" if raised is None else raised.traceback,
            results=self._results() if self.keep_going else {},
        ) from (None if raised is None else raised.unpickle())

    def _results(self) -> dict[str, Any]:
        """Return the results of the workers that finished, without those that cannot be unpickled here."""
        results = {}
        for worker in self.processes.values():
            if worker.succeeded():
                with contextlib.suppress(WorkerFailed):
                    results[worker.name] = _value(worker)
        return results


def _value(worker: SupervisedWorker) -> Any:
    if worker.killed_on_purpose:
        return None
    try:
        return worker.result.value()
    except Exception as error:
        raise WorkerFailed(
            f"worker {worker.name} returned a value that cannot be unpickled here: {error}", worker=worker.name
        ) from error
