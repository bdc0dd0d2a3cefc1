"""Runs a function on several workers of this machine, from a script, a notebook or a test.

The workers are forked from a server that has loaded torch. Environment variables that torch reads while it loads
therefore have the values from when the first group was started. Workers import a function of an importable module by
name. Any other function (a lambda, a function of the main script) is sent by value, and the main script is not imported
again. So a script needs no ``if __name__ == "__main__"`` guard.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from telegrad.environment.launchers import RESTART_VARIABLE
from telegrad.launch.forked import ForkedWorker, Startup, fork_worker, interpreter_state, start_server
from telegrad.launch.local_rendezvous import LocalRendezvous, worker_names
from telegrad.launch.output import PrefixedLines, prefixes
from telegrad.launch.restarts import WINDOW, RestartPolicy
from telegrad.launch.supervised_group import SupervisedGroup
from telegrad.launch.supervisor import GRACE, Failure, StopRequests, Supervisor
from telegrad.launch.work import dump_work

T = TypeVar("T")


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
) -> LocalGroup:
    """Start a group like `local`, without waiting for it. Use the group in a `with` statement, which stops it."""
    return start_group(
        worker_names(workers),
        dump_work(fn, args, init_options),
        prefix=prefix,
        init=init,
        devices_per_worker=devices_per_worker,
        policy=RestartPolicy(restart, restart_window),
        keep_going=keep_going,
    )


def start_group(
    names: Sequence[str],
    work: bytes,
    *,
    prefix: bool = True,
    init: bool = True,
    devices_per_worker: int | None = None,
    policy: RestartPolicy,
    keep_going: bool = False,
    others: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> LocalGroup:
    """Start a worker for each name, and let it do the work, pickled by `dump_work`.

    `others` are members of the group that are not started here: they follow in the order of ranks, and join at
    `LocalGroup.rendezvous`. `environment` has variables of the workers that count more than those of the rendezvous.
    """
    start_server()
    with contextlib.ExitStack() as resources:
        requests = StopRequests()
        resources.callback(requests.close)
        rendezvous = resources.enter_context(
            LocalRendezvous(
                [*names, *others],
                devices_per_worker,
                outlives_workers=keep_going or policy.limit > 0,
                awaits_replacements=policy.limit > 0 and not keep_going,
            )
        )
        supervisor: Supervisor[ForkedWorker] = resources.enter_context(
            Supervisor(requests, GRACE, policy, keep_going=keep_going, report=_report)
        )
        printers = [
            [PrefixedLines(text, target) if prefix else None for text in prefixes(names, target)]
            for target in (sys.stdout, sys.stderr)
        ]
        processes: dict[str, ForkedWorker] = {}
        # Once for all starts: a worker that is started again finds what the first one found.
        environments = [{**rendezvous.environment(rank), **(environment or {})} for rank in range(len(names))]
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
        return LocalGroup(processes, rendezvous, supervisor, requests, resources.pop_all())


def _report(sentence: str) -> None:
    print(f"telegrad launch: {sentence}", file=sys.stderr, flush=True)


class LocalGroup(SupervisedGroup[ForkedWorker]):
    """The workers of one group on this machine."""

    def __init__(
        self,
        processes: Mapping[str, ForkedWorker],
        rendezvous: LocalRendezvous,
        supervisor: Supervisor[ForkedWorker],
        requests: StopRequests,
        resources: contextlib.ExitStack,
    ) -> None:
        """Take over workers that run: their supervisor, and what is closed when the last has exited."""
        super().__init__(processes)
        self.rendezvous = rendezvous
        """Where the workers meet, as long as one of them runs."""
        self.keep_going = supervisor.keep_going
        self._supervisor = supervisor
        self._requests = requests
        self._resources = resources
        self.begin()

    def kill(self, name: str) -> None:
        """Kill one worker with SIGKILL. The others continue, to test how they handle the loss.

        It is started again if `restart` allows it. Otherwise its result is None. Does nothing if it does not run.
        """
        self._check_is_member(name)
        worker = self.processes[name]
        if worker.exitcode is None:
            worker.killed_on_purpose = True
            worker.kill()

    def _run(self) -> None:
        with self._resources:
            self._supervisor.run()

    def _request_stop(self) -> None:
        self._requests.stop()

    def _failures(self) -> Sequence[Failure[ForkedWorker]]:
        return self._supervisor.failures if self._supervisor.stop_signal is None else ()

    def _to_restart(self) -> set[str]:
        return set(self._supervisor.to_restart)
