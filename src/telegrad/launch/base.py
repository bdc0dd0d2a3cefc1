"""The contract of a group that a launcher has started, whatever places its processes.

An engine has a function ``start(fn, workers, args=(), *, prefix=True, init=True, init_options=None, ...)`` that starts
one worker for each name and returns a `Group`. Workers are known by name; how an engine runs them is its own business.
The rules, which `telegrad.testing.check_launcher` checks for any engine:

1. Each worker calls ``init_rpc(name, **init_options)``, then ``fn(*args)``, then ``shutdown()``. Without `init` it only
   calls `fn`. Function, arguments and results are sent with cloudpickle. What cannot be pickled is a PayloadError in
   `start`, and invalid or repeated names are a ValueError.
2. `Group.join` returns the results in the order of the workers.
3. When a worker raises or dies, the others are stopped, and `join` raises `WorkerFailed`, which names the worker, has
   its traceback, and the exception as its cause if that can be unpickled here.
4. When `join` times out or is interrupted, or the `with` block ends, all workers are stopped. None is left when the
   call returns.
5. `Group.kill` ends one worker at once, and the others go on. Its result is None.
6. With `prefix`, each line that a worker prints appears on the launcher's stdout or stderr with the worker's name.
7. If the launcher dies, so do its workers.

Restarts are optional. An engine that has them takes ``restart=N`` in `start`: a worker that raises or dies is started
again under its name, at most N times. The result of its last start counts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from telegrad.errors import TelegradError, UnknownWorker


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
        """-N if signal N killed the worker; None if the engine does not know."""
        self.remote_traceback = remote_traceback
        self.results = dict(results or {})
        """With `keep_going`: the results of the workers that finished, by name, if they can be unpickled here."""


class GroupTimeout(TelegradError, TimeoutError):
    """Not every worker finished in time. All have been stopped."""

    def __init__(self, message: str, *, unfinished: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.unfinished = list(unfinished)


class Group(ABC):
    """The workers that one `start` has started. Use it in a `with` statement, which stops them."""

    @property
    @abstractmethod
    def names(self) -> Sequence[str]:
        """The names of the workers, in order."""

    @abstractmethod
    def join(self, timeout: float | None = None) -> list[Any]:
        """Wait until every worker has finished, and return their results in order: None for one killed by `kill`.

        Raises `WorkerFailed`, or `GroupTimeout` after `timeout` seconds. After `stop`, raises a TelegradError unless
        all had finished. May be called again, and then returns or raises the same.
        """

    @abstractmethod
    def kill(self, name: str) -> None:
        """Kill one worker. The others continue, to test how they handle the loss. Does nothing if it does not run.

        Raises UnknownWorker if the group has no such worker.
        """

    @abstractmethod
    def stop(self) -> None:
        """Stop every running worker. None is left when this returns. May be called again."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    # -- for engines ------------------------------------------------------------------------------------------

    def _check_is_member(self, name: str) -> None:
        if name not in self.names:
            raise UnknownWorker(f"this group has no worker {name!r}; its workers are {', '.join(self.names)}")


def timed_out(unfinished: Sequence[str], timeout: float) -> GroupTimeout:
    """Return the error of a `join` that has waited for `timeout` seconds, after the group was stopped."""
    return GroupTimeout(
        f"{', '.join(unfinished)} did not finish within {timeout:g} seconds; all workers were stopped",
        unfinished=unfinished,
    )


def stopped_early(unfinished: Sequence[str]) -> TelegradError:
    """Return the error of a `join` after a `stop` that these workers did not survive."""
    return TelegradError(f"the group was stopped before {', '.join(unfinished)} finished, so it has no results")


def failed(
    worker: str,
    description: str,
    *,
    others: str = "the other workers were stopped",
    exitcode: int | None = None,
    remote_traceback: str = "",
    results: Mapping[str, Any] | None = None,
) -> WorkerFailed:
    """Return the error of a `join` after a worker failed.

    >>> print(failed("b", "raised ValueError: x", remote_traceback="Traceback ..."))
    worker b raised ValueError: x; the other workers were stopped
    <BLANKLINE>
    On b:
    <BLANKLINE>
    Traceback ...
    """
    trace = f"\n\nOn {worker}:\n\n{remote_traceback}" if remote_traceback else ""
    return WorkerFailed(
        f"worker {worker} {description}; {others}{trace}",
        worker=worker,
        exitcode=exitcode,
        remote_traceback=remote_traceback,
        results=results,
    )
