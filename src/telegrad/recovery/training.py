"""`Training`: a loop of steps that goes on when workers are lost and replaced.

One worker, the *driver*, runs the loop. The rules:

1. Every few steps the driver takes a *snapshot*: each worker copies the state of its objects, and then sends the copy
   to its *holder*, the next worker, while the training goes on. A snapshot is complete when every holder has its copy.
2. When a step fails because a worker was lost, the driver waits for its replacement, which the launcher starts. It
   builds everything anew on all workers, and all load the last complete snapshot: those that were there then from their
   own memory, replacements from their predecessors' holders, or from disk.
3. Before it goes on with the step after the snapshot, it takes the snapshot again, because replacements hold nothing.
   The one before is dropped only when this one is complete.

So any number of workers may be lost, one after the other, and at the same time if none is the holder of another. All
random generators are part of the snapshot, so the steps that are repeated have the same results.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, NamedTuple, Self, TypeVar

from telegrad.default_agent import default_agent
from telegrad.errors import DeadlineExceeded, RecoveryFailed, TelegradError
from telegrad.futures import Future
from telegrad.optim.fan_out import run_on_all
from telegrad.protocol.membership import State
from telegrad.recovery import files, shares
from telegrad.recovery.shares import SnapshotId
from telegrad.recovery.stateful import Found, find
from telegrad.rpc.api import rpc_async
from telegrad.rpc.membership import wait_for_worker

_log = logging.getLogger("telegrad")

T = TypeVar("T")
_GRACE = 5.0  # seconds within which a loss that an error speaks of is noticed here
_POLL = 0.05


class Recovery(NamedTuple):
    """One recovery, for the user's records."""

    workers: tuple[str, ...]
    """Which were lost."""
    step: int
    """The step that failed."""
    resumed: int
    """The step that the training went on with."""
    seconds: float
    """From the failure of the step until the training went on."""


class _Snapshot(NamedTuple):
    id: SnapshotId
    step: int
    holders: dict[str, str | None]
    incarnations: dict[str, int]


class Training(Generic[T]):
    """Runs steps of a training on several workers, and repeats some of them after a worker was lost.

    `build` creates modules, optimizers and whatever else the steps use, on this worker and on others, and returns them
    in any structure of dicts, lists, tuples and dataclasses; `state` is what it returned. It is called again after a
    loss, and must build the same every time. A snapshot is taken every `every` steps. With a `directory`, which all
    workers must see, snapshots are written to disk, too, and a training that is started anew goes on from the last one.
    `replacement_timeout` is how many seconds to wait for the replacement of a lost worker.

    >>> training = Training(lambda: torch.nn.Linear(2, 1), every=10)
    >>> for step in training.steps(100):
    ...     with training:
    ...         training.state(data[step])
    """

    def __init__(
        self,
        build: Callable[[], T],
        *,
        every: int = 10,
        directory: str | Path | None = None,
        replacement_timeout: float = 300.0,
    ) -> None:
        if every < 1:
            raise ValueError(f"a snapshot is taken every {every} steps, but it must be at least 1")
        self._build = build
        self._every = every
        self._directory = None if directory is None else Path(directory).absolute()
        self._timeout = replacement_timeout
        self._agent = default_agent()
        if self._agent.registry is not None:
            raise TelegradError(
                "a training cannot be recovered in registered mode: its workers do not trust each other"
            )
        self._run = f"{self._agent.me.name}/{secrets.token_hex(8)}"
        self._number = 0
        self._step = 0
        self._built: list[T] = []
        self._found = Found({}, {})
        self._incarnations: dict[str, int] = {}  # of all workers, when the state was built
        self._complete: _Snapshot | None = None
        self._pushing: tuple[_Snapshot, list[Future[None]]] | None = None
        self._failure: Exception | None = None
        self._entered = False
        self.recoveries: list[Recovery] = []
        """The recoveries so far."""

    @property
    def state(self) -> T:
        """What `build` has returned last."""
        if not self._built:
            raise TelegradError("there is no state yet: use it inside the loop over steps()")
        return self._built[0]

    # -- the loop -------------------------------------------------------------------------------------------------

    def run(self, step: Callable[[T, int], object], count: int) -> None:
        """Call ``step(state, number)`` for each of `count` steps, as often as necessary."""
        for number in self.steps(count):
            with self:
                step(self.state, number)

    def steps(self, count: int) -> Iterator[int]:
        """Yield the numbers of the steps, and those that must be repeated again. Use ``with`` around each step."""
        try:
            if self._complete is None:
                self._recover(None)
            while self._step < count:
                self._entered, self._failure = False, None
                yield self._step
                if not self._entered:
                    raise TelegradError("write `with training:` around the body of the loop over steps()")
                if self._failure is None:
                    self._step += 1
                    self._attempt(self._end_of_step)
                if self._failure is not None:
                    self._recover(self._failure)
            self._attempt(self._finish_push)
        finally:
            self._drop_all()

    def __enter__(self) -> Self:
        self._entered = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if not isinstance(error, Exception) or not self._is_loss(error):
            return False
        self._failure = error
        return True

    def _attempt(self, action: Callable[[], None]) -> None:
        with self:
            action()

    def _end_of_step(self) -> None:
        if self._pushing is not None and all(future.done() for future in self._pushing[1]):
            self._finish_push()
        if self._step % self._every == 0:
            self._take_snapshot()

    # -- losses ---------------------------------------------------------------------------------------------------

    def _current(self) -> dict[str, int]:
        """Return the incarnations of all workers that are alive."""
        return {
            member.identity.name: member.identity.incarnation
            for member in self._agent.peers.members.all()
            if member.state is State.ALIVE
        }

    def _lost(self) -> list[str]:
        """Return the workers that are not those any more with which the state was built."""
        current = self._current()
        return [name for name, incarnation in self._incarnations.items() if current.get(name) != incarnation]

    def _is_loss(self, error: Exception) -> bool:
        """Return whether a worker was lost, which the error may speak of before this worker has noticed it."""
        runtime = self._agent.runtime
        deadline = runtime.now() + _GRACE
        while not self._lost():
            if not isinstance(error, TelegradError | ConnectionError) or runtime.now() >= deadline:
                return False
            self._agent.executor.wait(runtime.event(), runtime.now() + _POLL)
        return True

    def _recover(self, failure: Exception | None) -> None:
        """Build the state on all workers, load the last complete snapshot, and take it again."""
        began, failed_at = self._agent.runtime.now(), self._step
        workers: set[str] = set()
        while True:
            lost = self._lost()
            workers.update(lost)
            if lost:
                _log.warning(
                    "the training lost worker %s in step %d, and waits for a replacement",
                    " and ".join(map(repr, lost)),
                    failed_at,
                )
            try:
                self._rebuild()
                break
            except Exception as error:
                if isinstance(error, RecoveryFailed) or not self._is_loss(error):
                    raise
        if failure is not None:
            seconds = self._agent.runtime.now() - began
            self.recoveries.append(Recovery(tuple(sorted(workers)), failed_at, self._step, seconds))
            _log.warning(
                "worker %s was replaced: the training goes on with step %d, after %.1f s",
                " and ".join(map(repr, sorted(workers))),
                self._step,
                seconds,
            )

    def _rebuild(self) -> None:
        self._incarnations = self._wait_for_all()
        self._pushing = None
        self._built.clear()  # the old objects are released before there are new ones
        self._found = Found({}, {})
        state = self._build()
        self._built.append(state)
        self._found = find(state)
        if self._complete is not None:
            self._load(self._complete)
        elif self._directory is not None:
            self._load_from_disk(self._directory)
        self._take_snapshot()
        self._finish_push()

    def _wait_for_all(self) -> dict[str, int]:
        """Wait until all workers are there, and return their incarnations."""
        while missing := [name for name in self._incarnations if name not in self._current()]:
            try:
                wait_for_worker(missing[0], self._timeout)
            except DeadlineExceeded as error:
                raise RecoveryFailed(
                    f"worker {missing[0]!r} was lost and not replaced within {self._timeout:g} s: start the workers "
                    "with `telegrad run --restart N`, or start it again by hand"
                ) from error
        return self._current()

    # -- snapshots ------------------------------------------------------------------------------------------------

    def _take_snapshot(self) -> None:
        if self._pushing is not None:
            self._finish_push()
        for optimizer in self._found.optimizers():
            optimizer.send_hyperparameters()
        self._number += 1
        names = list(self._incarnations)
        following = dict(zip(names, [*names[1:], names[0]], strict=True))
        snapshot = _Snapshot(
            SnapshotId(self._run, self._number),
            self._step,
            {name: holder if holder != name else None for name, holder in following.items()},
            dict(self._incarnations),
        )
        oldest = self._complete.id.number if self._complete is not None else 0
        shares.take_values(snapshot.id, self._found.local, oldest)
        self._on_all(
            "taking a snapshot",
            {name: (shares.take, (snapshot.id, self._found.remote.get(name, {}), oldest)) for name in self._others()},
        )
        directory = None if self._directory is None else str(self._directory)
        pushes = [
            rpc_async(name, shares.push, (snapshot.id, holder, directory), timeout=0)
            for name, holder in snapshot.holders.items()
        ]
        self._pushing = snapshot, pushes

    def _finish_push(self) -> None:
        """Wait until the snapshot that is being sent is complete."""
        if self._pushing is None:
            return
        snapshot, pushes = self._pushing
        for push in pushes:
            push.wait()
        self._pushing = None
        self._complete = snapshot
        if self._directory is not None:
            files.commit(self._directory, files.Latest(snapshot.id.number, snapshot.step))

    def _load(self, snapshot: _Snapshot) -> None:
        """Let all workers load a snapshot, those that were replaced since from elsewhere."""
        fetches = {}
        for name, incarnation in self._incarnations.items():
            if snapshot.incarnations.get(name) == incarnation:
                continue
            holder = snapshot.holders.get(name)
            if holder is None or self._incarnations.get(holder) != snapshot.incarnations[holder]:
                if self._directory is None:
                    raise RecoveryFailed(
                        f"worker {name!r} and worker {holder!r}, which held its snapshot, were lost at the same time: "
                        "pass a directory to Training, and start the training again"
                    )
                holder = None
            directory = None if self._directory is None else str(self._directory)
            fetches[name] = shares.fetch, (snapshot.id, holder, directory)
        self._load_all(snapshot.id, snapshot.step, fetches)

    def _load_from_disk(self, directory: Path) -> None:
        latest = files.latest(directory)
        if latest is None:
            directory.mkdir(parents=True, exist_ok=True)
            return
        self._number = latest.number
        snapshot = SnapshotId(self._run, latest.number)
        fetches = {name: (shares.fetch, (snapshot, None, str(directory))) for name in self._incarnations}
        self._load_all(snapshot, latest.step, fetches)
        _log.warning("the training goes on with step %d, from the snapshot in %s", self._step, directory)

    def _load_all(self, snapshot: SnapshotId, step: int, fetches: dict[str, Any]) -> None:
        fetched = self._on_all("fetching a snapshot", fetches)
        missing = [name for name, there in zip(fetches, fetched, strict=True) if not there]
        if missing:
            raise RecoveryFailed(f"there is no snapshot {snapshot.number} of worker {' and '.join(map(repr, missing))}")
        self._on_all(
            "loading a snapshot",
            {name: (shares.load, (snapshot, self._found.remote.get(name, {}))) for name in self._others()},
        )
        shares.load_values(snapshot, self._found.local)
        self._step = step

    def _others(self) -> list[str]:
        return [name for name in self._incarnations if name != self._agent.me.name]

    def _on_all(self, what: str, calls: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]) -> list[Any]:
        return run_on_all(
            what,
            [(name, partial(rpc_async, name, function, args, timeout=0)) for name, (function, args) in calls.items()],
        )

    def _drop_all(self) -> None:
        """Free the snapshots on all workers that are still there."""
        self._pushing = None
        for name in self._current():
            rpc_async(name, shares.drop, (self._run, self._number + 1))
