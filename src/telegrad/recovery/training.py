"""`Training`: a loop of steps that goes on when workers are lost and replaced.

One worker, the *driver*, runs the loop. The rules:

1. Every few steps the driver takes a *snapshot*: each worker copies the state of its objects, and then sends the copy
   to its *holders*, the next workers, while the training goes on. A snapshot is complete when all of them have it.
2. When a step fails because a worker was lost, the driver waits for its replacement, which the launcher starts, and
   until all workers know all others. It builds everything anew on all workers, and all load the last complete snapshot:
   those that were there then from their own memory, replacements from a holder of their predecessors, or from disk.
3. What was lost before the first snapshot is built again with the random numbers that it was built with at first.
4. Before it goes on with the step after the snapshot, it takes the snapshot again, because replacements hold nothing.
   The one before is dropped only when this one is complete.

So any number of workers may be lost, one after the other, and at the same time if of each one a holder remains. All
random generators are part of the snapshot, so the steps that are repeated have the same results.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Generic, NamedTuple, Self, TypeVar

from telegrad.calls.tracebacks import RemoteTraceback
from telegrad.default_agent import default_agent
from telegrad.errors import DeadlineExceeded, RecoveryFailed, TelegradError
from telegrad.protocol.membership import State
from telegrad.recovery.agreement import all_agree
from telegrad.recovery.snapshots import Snapshots
from telegrad.recovery.stateful import Found, find
from telegrad.rpc.membership import wait_for_worker
from telegrad.waiting_report import workers as named

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


class Training(Generic[T]):
    """Runs steps of a training on several workers, and repeats some of them after a worker was lost.

    `build` creates modules, optimizers and whatever else the steps use, on this worker and on others, and returns them
    in any structure of dicts, lists, tuples and dataclasses; `state` is what it returned. It is called again after a
    loss, and must build the same every time. A snapshot is taken every `every` steps, and `copies` other workers hold
    the share of each one in their memory. With a `directory`, which all workers must see, snapshots are written to
    disk, too, and a training that is started anew goes on from the last one. `replacement_timeout` is how many seconds
    to wait for the replacement of a lost worker. ::

        training = Training(build, every=10)
        for step in training.steps(1000):
            with training:
                train_on(training.state, data[step])
    """

    def __init__(
        self,
        build: Callable[[], T],
        *,
        every: int = 10,
        copies: int = 2,
        directory: str | Path | None = None,
        replacement_timeout: float = 300.0,
    ) -> None:
        if type(every) is not int or every < 1:
            raise ValueError(f"a snapshot is taken every {every!r} steps, but it must be an integer, at least 1")
        if not replacement_timeout >= 0:
            raise ValueError(f"replacement_timeout must be at least 0 seconds, not {replacement_timeout!r}")
        if type(copies) is not int or copies < 0 or (not copies and directory is None):
            raise ValueError(f"{copies!r} workers cannot hold a snapshot: at least 1, or 0 with a directory")
        if directory == "":
            raise ValueError("the directory for snapshots is an empty string: name one, or pass None for none")
        self._build = build
        self._every = every
        self._timeout = replacement_timeout
        self._agent = default_agent()
        if self._agent.registry is not None:
            raise TelegradError(
                "a training cannot be recovered in registered mode: its workers do not trust each other"
            )
        path = None if directory is None else Path(directory).absolute()
        self._snapshots = Snapshots(self._agent.me.name, self._agent.me.incarnation, copies, path)
        self._directory = path
        self._step = 0
        self._built: list[T] = []
        self._found = Found({}, {})
        self._incarnations: dict[str, int] = {}  # of all workers, when the state was built
        self._failed = False
        self._entered = False
        self._completed = False
        self._looping = False
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
        if self._looping:
            raise TelegradError("a loop over steps() of this training is running: one at a time")
        self._looping = True
        try:
            self._begin()
            while self._step < count or self._is_spoiled():
                if self._step < count:
                    self._entered = self._completed = self._failed = False
                    try:
                        yield self._step
                    except GeneratorExit:  # the caller leaves the loop, after the step or in it
                        self._step += self._completed and not self._failed
                        raise
                    if not self._entered:
                        raise TelegradError("write `with training:` around the body of the loop over steps()")
                    if not self._failed:
                        self._step += 1
                        self._attempt(self._end_of_step)
                if self._failed:
                    self._recover()
        finally:
            self._looping = False
            self._snapshots.drop_all(list(self._current()))

    def _begin(self) -> None:
        """Build the state, or take a snapshot of it if this is not the first loop."""
        if not self._built:
            if self._directory is None and self._generation() > 0:
                _log.warning(
                    "worker %r was started again, and its training begins anew: pass a directory to Training, so that "
                    "it goes on from the last snapshot",
                    self._agent.me.name,
                )
            members = self._agent.peers.members
            if not members.is_open:  # one may have been lost before the first step
                self._incarnations = {each.identity.name: each.identity.incarnation for each in members.all()}
            self._recover()
            return
        self._failed = False
        self._attempt(self._take_snapshot)
        if self._failed and self._directory is None:
            raise RecoveryFailed(
                f"the training lost {named(self._lost())} between two loops over steps(), when there is no snapshot: "
                "use one loop, or pass a directory to Training"
            )
        if self._failed:
            self._recover()

    def __enter__(self) -> Self:
        if not self._looping:
            raise TelegradError("`with training:` belongs into the body of a loop over steps()")
        self._entered = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if error is None:
            # What a worker did may be lost with it although no call failed: its replacement may have taken them.
            self._failed = self._failed or bool(self._lost())
            self._completed = True
            return False
        if not isinstance(error, Exception) or not self._is_loss(error):
            return False
        if not isinstance(error, TelegradError | ConnectionError):
            _log.warning("step %d failed when a worker was lost, and is repeated: %r", self._step, error)
        self._failed = True
        return True

    def _is_spoiled(self) -> bool:
        """Return whether a worker was lost after the last step."""
        self._failed = False
        self._attempt(self._snapshots.finish)
        self._failed = self._failed or bool(self._lost())
        return self._failed

    def _attempt(self, action: Callable[[], None]) -> None:
        with self:
            action()

    def _end_of_step(self) -> None:
        self._snapshots.finish_if_ready()
        if self._step % self._every == 0:
            self._snapshots.begin(self._found, self._staying(), self._step)

    def _take_snapshot(self) -> None:
        self._snapshots.begin(self._found, self._staying(), self._step)
        self._snapshots.finish()

    # -- losses ---------------------------------------------------------------------------------------------------

    def _current(self) -> dict[str, int]:
        """Return the incarnations of all workers that are alive."""
        return {
            member.identity.name: member.identity.incarnation
            for member in self._agent.peers.members.all()
            if member.state is State.ALIVE
        }

    def _generation(self) -> int:
        me = self._agent.peers.members.find(self._agent.me.name)
        return me.identity.generation if me is not None else 0

    def _staying(self) -> dict[str, int]:
        """Return the workers with which the state was built, without those that have left in order since then."""
        left = {member.identity.name for member in self._agent.peers.members.all() if member.state is State.LEFT}
        return {name: incarnation for name, incarnation in self._incarnations.items() if name not in left}

    def _lost(self) -> list[str]:
        """Return the workers that are not those any more with which the state was built."""
        current = self._current()
        return [name for name, incarnation in self._staying().items() if current.get(name) != incarnation]

    def _is_loss(self, error: Exception) -> bool:
        """Return whether the error may speak of the loss of a worker, maybe before this worker has noticed it."""
        if not _may_be_a_loss(error, self._lost()):
            return False
        runtime = self._agent.runtime
        deadline = runtime.now() + _GRACE
        while not self._lost():
            if runtime.now() >= deadline:
                return False
            self._agent.executor.wait(runtime.event(), runtime.now() + _POLL)
        return True

    def _recover(self) -> None:
        """Build the state on all workers, load the last complete snapshot, and take it again."""
        began, failed_at = self._agent.runtime.now(), self._step
        workers: set[str] = set()
        while True:
            lost = self._lost()
            workers.update(lost)
            if lost:
                _log.warning("the training lost %s in step %d, and waits for a replacement", named(lost), failed_at)
            if (given_up := self._agent.local.given_up) is not None:
                raise given_up  # those who seem lost to this worker wait for its replacement
            current = self._wait_for_all()
            workers.update(name for name, one in self._staying().items() if current.get(name) != one)
            self._incarnations = current
            try:
                if all_agree(self._staying, self._lost, self._timeout):
                    self._rebuild()
                    break
            except Exception as error:
                # One that was replaced since then has no share, so its RecoveryFailed is not the last word.
                if not (self._lost() if isinstance(error, RecoveryFailed) else self._is_loss(error)):
                    raise
        if workers:
            seconds = self._agent.runtime.now() - began
            self.recoveries.append(Recovery(tuple(sorted(workers)), failed_at, self._step, seconds))
            _log.warning(
                "the training goes on with step %d, %.1f s after the loss of %s", self._step, seconds, named(workers)
            )

    def _rebuild(self) -> None:
        self._built.clear()  # the old objects are released before there are new ones
        self._found = Found({}, {})
        self._snapshots.go_to_beginning(self._incarnations)
        state = self._build()
        self._found = find(state)
        self._step = self._snapshots.load(self._found, self._incarnations)
        self._take_snapshot()
        self._built.append(state)

    def _wait_for_all(self) -> dict[str, int]:
        """Wait until all workers are there, and return their incarnations."""
        while missing := [name for name in self._staying() if name not in self._current()]:
            try:
                wait_for_worker(missing[0], self._timeout)
            except DeadlineExceeded as error:
                reason = self._agent.peers.find(missing[0]).gone
                raise RecoveryFailed(
                    f"worker {missing[0]!r} was lost ({reason}) and not replaced within {self._timeout:g} s: start the "
                    "workers with `telegrad run --restart N`, or start it again by hand. If its process still runs, "
                    "end it first"
                ) from error
        return self._current()


def _may_be_a_loss(error: Exception, lost: list[str]) -> bool:
    """Return whether an error may speak of a loss. If not, it says that workers were lost at the same time."""
    if _is_from_a_call(error):
        return True
    if lost:
        error.add_note(f"(the step lost {named(lost)}, too, and is not repeated: no call raised this error)")
    return False


def _is_from_a_call(error: BaseException | None) -> bool:
    """Return whether a call has raised an error, or one that it was raised for."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, TelegradError | ConnectionError | RemoteTraceback):
            return True
        if isinstance(error, BaseExceptionGroup) and any(map(_is_from_a_call, error.exceptions)):
            return True
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return False
