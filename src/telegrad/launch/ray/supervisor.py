"""Supervises the workers of a group that Ray runs: one loop that learns when they start and end.

The rules are those of `telegrad.launch.supervisor`, with these differences:

1. A worker ends when its function returns or raises, or when Ray says that its actor has died. Then its actor is
   killed, and the worker has ended when its process is gone.
2. At most one actor of each name is wanted. Ray may declare a node dead that is only cut off. If its worker still runs
   there, the group takes the later start for the worker, and the earlier one learns that it was replaced.
3. When a worker raises because another was lost, Ray may not have noticed that loss yet. So the worker that raised is
   judged when the lost one has ended, or after `_NOTICED_WITHIN` seconds. `failures` begins with the cause.
4. Ray may place a worker on a node that is dead, before it notices. A start that never ran because of its node is
   made again after `_PAUSE` seconds, and does not count, until `start_within` seconds have passed. Then the worker
   has failed because of its nodes.
5. The loop ends at the latest `_GIVE_UP` seconds after the workers were killed, even if Ray does not answer any more.

Nothing here imports Ray. `Starter` is what the loop needs of it.
"""

from __future__ import annotations

import queue
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from telegrad.errors import WorkerLost
from telegrad.launch.ray.outcome import Outcome, Place
from telegrad.launch.restarts import RestartHistory, RestartPolicy
from telegrad.launch.supervisor import GRACE, Failure, Timers

_NOTICED_WITHIN = 20.0
_GIVE_UP = 30.0
_ANNOUNCED_DELAY = 1.0
_PAUSE = 1.0


class Actor(Protocol):
    """One start of a worker."""

    def kill(self) -> None:
        """Kill the actor, if it has not ended."""

    def finish(self, place: Place | None, died: bool, gone: Callable[[], None]) -> None:
        """Kill the actor, and call `gone` when its process has ended. `died`: Ray says that it has."""


class Starter(Protocol):
    """Starts and stops actors."""

    def start(
        self, rank: int, restart: int, started: Callable[[Place], None], ended: Callable[[Outcome], None]
    ) -> Actor:
        """Start a worker. `started` and `ended` are called later, once each, by any thread."""

    def request_stop(self) -> None:
        """Send SIGTERM to all workers."""


@dataclass
class RayWorker:
    """One start of a worker, with the attributes of `telegrad.launch.forked.ForkedWorker` that users see."""

    name: str
    rank: int
    restart: int
    actor: Actor | None = None
    place: Place | None = None
    """None until the worker runs."""
    finishing: bool = False
    """Whether it is known how the worker has ended."""
    ended: bool = False
    """Whether its process is gone, too."""
    exitcode: int | None = None
    """0 if its function returned, 1 if it raised, -9 if it was killed by `kill`. Else None: Ray does not tell."""
    killed_on_purpose: bool = False
    result: Outcome = field(default_factory=Outcome)
    started: float = field(default_factory=time.monotonic)
    start_by: float = 0.0
    """When Ray must have placed it."""
    earlier: Outcome | None = None
    """How the start before this one ended, if that never ran and this one was made in its place."""

    @property
    def pid(self) -> int | None:
        """Its process on its node; None until the worker runs."""
        return None if self.place is None else self.place.process.pid

    def failed(self) -> bool:
        """Return whether the function raised or the actor died. Being killed on purpose is not a failure."""
        return self.ended and self.exitcode != 0 and not self.killed_on_purpose

    def succeeded(self) -> bool:
        """Return whether the function returned."""
        return self.exitcode == 0

    def describe_exit(self) -> str:
        """Return how this worker failed, as in "raised ValueError: x"."""
        if self.result.is_error():
            return f"raised {self.result.raised().summary}"
        return f"died before its function returned: {self.result.death}"

    def details(self) -> str:
        """Return the traceback of the exception that the function raised, if it did."""
        return self.result.raised().traceback if self.result.is_error() else ""

    def kill(self) -> None:
        """Kill the actor."""
        if self.actor is not None:
            self.actor.kill()


class Supervisor:
    """Watches the workers until the last has ended."""

    def __init__(
        self,
        names: Sequence[str],
        starter: Starter,
        policy: RestartPolicy,
        *,
        keep_going: bool = False,
        start_within: float = 300.0,
        grace: float = GRACE,
        report: Callable[[str], None] = lambda sentence: None,
    ) -> None:
        self.failures: list[Failure[RayWorker]] = []
        """The workers that failed for good before the group was stopped, in order."""
        self.stop_signal: signal.Signals | None = None
        """SIGTERM if `stop` stopped the group."""
        self.to_restart: set[str] = set()
        """The names of the workers that ended and are not started again yet."""
        self.keep_going = keep_going
        self.workers: dict[str, RayWorker] = {}
        """The last start of each worker."""
        self.names = list(names)
        self._starter = starter
        self._policy = policy
        self._start_within = start_within
        self._grace = grace
        self._report = report
        self._histories = {name: RestartHistory(policy) for name in names}
        self._events: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._timers = Timers()
        self._running: list[RayWorker] = []
        self._undecided: list[RayWorker] = []  # they raised because another worker was lost, which has not ended yet
        self._stopping = False

    def start(self) -> None:
        """Start all workers."""
        for rank in range(len(self.names)):
            self._start(rank, 0)

    def stop(self) -> None:
        """Stop all workers, and kill them if it is called again. Any thread may call this."""
        self._events.put(self._on_stop)

    def run(self) -> None:
        """Return when every worker has ended and none is to be started again."""
        while self._running or self.to_restart or self._undecided:
            self._timers.run_next(self._events)

    def _start(self, rank: int, restart: int, never_ran: RayWorker | None = None) -> None:
        """Start a worker, or make a start again that never ran."""
        worker = RayWorker(self.names[rank], rank, restart)
        worker.start_by = time.monotonic() + self._start_within if never_ran is None else never_ran.start_by
        worker.earlier = None if never_ran is None else never_ran.result
        self.workers[worker.name] = worker
        self._running.append(worker)
        worker.actor = self._starter.start(
            rank,
            restart,
            lambda place: self._events.put(partial(self._on_started, worker, place)),
            lambda outcome: self._events.put(partial(self._on_ended, worker, outcome)),
        )
        self._timers.call_in(max(0.0, worker.start_by - time.monotonic()), partial(self._check_started, worker))

    def _on_started(self, worker: RayWorker, place: Place) -> None:
        worker.place = place
        worker.started = time.monotonic()

    def _check_started(self, worker: RayWorker) -> None:
        if worker.place is None and worker in self._running:
            # What ended the start before says more than that there was no time for another one.
            self._on_ended(
                worker,
                worker.earlier
                or Outcome(
                    death=f"Ray did not start it within {self._start_within:g} s: see whether the cluster has the "
                    "resources that it asks for (`ray status`), or raise the timeout"
                ),
            )

    def _on_ended(self, worker: RayWorker, outcome: Outcome) -> None:
        if worker.finishing or worker.actor is None:
            return
        worker.finishing = True
        worker.result = outcome
        died = not outcome.complete()
        worker.actor.finish(worker.place, died, lambda: self._events.put(partial(self._on_gone, worker)))

    def _on_gone(self, worker: RayWorker) -> None:
        if worker not in self._running:
            return
        self._running.remove(worker)
        if worker.result.complete():
            worker.exitcode = int(worker.result.is_error())
        elif worker.killed_on_purpose:
            worker.exitcode = -signal.SIGKILL
        worker.ended = True
        if self._stopping:
            return
        lost = _blamed(worker)
        if lost is not None and any(other.name == lost for other in self._running):
            self._undecided.append(worker)
            self._timers.call_in(_NOTICED_WITHIN, partial(self._decide, worker))
        else:
            self._restart_or_fail(worker)
        for other in [one for one in self._undecided if _blamed(one) == worker.name]:
            self._decide(other)

    def _decide(self, worker: RayWorker) -> None:
        if worker in self._undecided:
            self._undecided.remove(worker)
            if not self._stopping:
                self._restart_or_fail(worker)

    def _restart_or_fail(self, worker: RayWorker) -> None:
        if worker.succeeded():
            return
        never_ran = worker.result.node_lost and worker.place is None and not worker.killed_on_purpose
        if never_ran and time.monotonic() + _PAUSE < worker.start_by:
            self.to_restart.add(worker.name)
            self._timers.call_in(_PAUSE, partial(self._place_again, worker))
            return
        what = "was killed" if worker.killed_on_purpose else worker.describe_exit()
        restart = self._histories[worker.name].next(worker.started, time.monotonic()) if self._policy.limit else None
        limit, window = self._policy.limit, self._policy.window
        limits = f"{limit} restart{'' if limit == 1 else 's'} within {window:g} s"
        if restart is not None:
            self.to_restart.add(worker.name)
            if restart.delay >= _ANNOUNCED_DELAY:
                self._report(f"{worker.name} {what}; it is started again in {restart.delay:g} s")
            done = f"{what}; started again ({restart.used} of {limits})"
            self._timers.call_in(restart.delay, partial(self._start_again, worker, done))
        elif worker.failed():
            self._fail(worker, f"{what} (after {limits})" if limit else what)

    def _place_again(self, worker: RayWorker) -> None:
        if not self._stopping:
            # With the next number: it is not certain that the process never ran.
            self._start(worker.rank, worker.restart + 1, worker)
            self.to_restart.remove(worker.name)

    def _start_again(self, worker: RayWorker, done: str) -> None:
        if self._stopping:
            return
        self._start(worker.rank, worker.restart + 1)
        self.to_restart.remove(worker.name)
        self._report_failure(worker, done)

    def _fail(self, worker: RayWorker, description: str) -> None:
        self.failures.append(Failure(worker, description))
        if not self.keep_going:
            self._stop()
        elif self._running or self.to_restart:
            self._report_failure(worker, f"{description}; the other workers continue")

    def _report_failure(self, worker: RayWorker, sentence: str) -> None:
        details = worker.details()
        self._report(f"{worker.name} {sentence}" + (f"\n{details}" if details else ""))

    # -- the end of the group ---------------------------------------------------------------------------------

    def _on_stop(self) -> None:
        if not self._stopping:
            self.stop_signal = signal.SIGTERM
            self._stop()
        else:
            self._kill_all()

    def _stop(self) -> None:
        self._stopping = True
        self.to_restart.clear()
        self._undecided.clear()
        if not self._running:
            return
        self._starter.request_stop()
        self._timers.call_in(self._grace, self._kill_all)
        for worker in self._running:
            if worker.place is None:  # it may never start
                worker.kill()

    def _kill_all(self) -> None:
        for worker in self._running:
            worker.kill()
        self._timers.call_in(_GIVE_UP, self._give_up)

    def _give_up(self) -> None:
        for worker in list(self._running):
            if not worker.finishing:
                worker.result = Outcome(death=f"Ray did not confirm its end within {_GIVE_UP:g} s")
            self._on_gone(worker)


def _blamed(worker: RayWorker) -> str | None:
    """Return the worker whose loss made this one raise, if that is why it ended."""
    error: Any = worker.result.raised().unpickle() if worker.result.is_error() else None
    while error is not None:
        if isinstance(error, WorkerLost):
            return error.worker or None
        error = error.__cause__
    return None
