"""Runs a function on workers that are Ray actors; see `telegrad.launch.base` for the contract."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from telegrad.launch.local_rendezvous import worker_names
from telegrad.launch.ray.supervisor import RayWorker, Supervisor
from telegrad.launch.restarts import WINDOW, RestartPolicy
from telegrad.launch.supervised_group import SupervisedGroup
from telegrad.launch.supervisor import Failure
from telegrad.launch.work import dump_work

_AWAITED = 180.0
"""Seconds within which a worker that was started again is there. Ray takes up to a minute to notice a dead node."""


def group(
    fn: Callable[..., Any],
    workers: int | Sequence[str],
    args: Sequence[Any] = (),
    *,
    prefix: bool = True,
    resources: Mapping[str, float] | None = None,
    placement: str = "SPREAD",
    runtime_env: Mapping[str, Any] | None = None,
    timeout: float = 300.0,
    init: bool = True,
    init_options: Mapping[str, Any] | None = None,
    restart: int = 0,
    restart_window: float = WINDOW,
    keep_going: bool = False,
) -> RayGroup:
    """Start a group whose workers are Ray actors, without waiting for it. Use it in a `with` statement, which stops it.

    Each worker has its own bundle of a placement group, with `resources` (default: 1 CPU), placed by the strategy
    `placement` (SPREAD, PACK, STRICT_SPREAD, STRICT_PACK). Ray must have room for all within `timeout` seconds, and
    for a worker that is started again. `runtime_env` is Ray's. Ray prints the output of workers with their names, so
    `prefix` must be true. The rest is as in `telegrad.launch.start`.

    If Ray is not initialized, this calls ``ray.init()``.
    """
    from telegrad.launch.ray.engine import RayStarter, Rendezvous, import_ray

    if not prefix:
        raise ValueError("Ray prints the output of all workers with their names: leave prefix=False out")
    names = worker_names(workers)
    policy = RestartPolicy(restart, restart_window)
    work = dump_work(fn, args, init_options)
    import_ray()
    with contextlib.ExitStack() as closing:
        rendezvous = Rendezvous(names, awaited=_AWAITED if restart and not keep_going else 0.0)
        closing.callback(rendezvous.close)
        amounts = {"CPU": 1.0} if resources is None else resources
        starter = RayStarter(rendezvous, work, init, len(names), amounts, placement, runtime_env, timeout)
        closing.callback(starter.close)
        supervisor = Supervisor(names, starter, policy, keep_going=keep_going, start_within=timeout, report=_report)
        return RayGroup(supervisor, closing.pop_all())


def _report(sentence: str) -> None:
    print(f"telegrad launch: {sentence}", file=sys.stderr, flush=True)


class RayGroup(SupervisedGroup[RayWorker]):
    """The workers of one group in a Ray cluster, supervised by a thread of the driver until the last has ended."""

    def __init__(self, supervisor: Supervisor, resources: contextlib.ExitStack) -> None:
        """Start the workers. `resources` are closed when the last has ended."""
        super().__init__(supervisor.workers)
        self.keep_going = supervisor.keep_going
        self._supervisor = supervisor
        self._resources = resources
        self._started = threading.Event()
        self.begin("telegrad-launch-ray")
        self._started.wait()

    @property
    def names(self) -> Sequence[str]:
        """The names of the workers, in order."""
        return self._supervisor.names

    def kill(self, name: str) -> None:
        """Kill one worker. The others continue, to test how they handle the loss.

        It is started again if `restart` allows it. Otherwise its result is None. Does nothing if it does not run.
        """
        self._check_is_member(name)
        worker = self.processes[name]
        if not worker.finishing:
            worker.killed_on_purpose = True
            worker.kill()

    def _run(self) -> None:
        with self._resources:
            try:
                self._supervisor.start()
            finally:
                self._started.set()
            self._supervisor.run()

    def _request_stop(self) -> None:
        self._supervisor.stop()

    def _failures(self) -> Sequence[Failure[RayWorker]]:
        return self._supervisor.failures if self._supervisor.stop_signal is None else ()

    def _to_restart(self) -> set[str]:
        return set(self._supervisor.to_restart)
