"""Everybody brings a value, and gets everybody's: the barrier, all_gather, and the rounds of an orderly shutdown.

The member with the lowest id collects. Each member calls it, and it answers all of them when the last one came.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

from telegrad.connection.peers import Peer, Peers
from telegrad.connection.worker_record import WorkerRecord
from telegrad.errors import DeadlineExceeded, TelegradError, WorkerLost
from telegrad.execution.executor import Executor
from telegrad.execution.timers import Timer
from telegrad.waiting import Runtime

_log = logging.getLogger("telegrad")

SERVICE = "@telegrad.gather"
_PATIENCE = 1.0  # seconds after which those that have not come are looked after
_KNOCK = 10.0

Answer = Callable[[object, Exception | None], None]


class CollectivesOwner(Protocol):
    """What gathering needs of its agent."""

    runtime: Runtime
    executor: Executor
    me: WorkerRecord
    peers: Peers

    def call(self, to: str | int, function: Any, args: tuple[Any, ...] = ..., *, timeout: float | None = ...) -> Any:
        """Call a function or a registered name on a worker."""


class _Meeting:
    def __init__(self, expected: set[str]) -> None:
        self.expected = expected
        self.values: dict[str, Any] = {}
        self.answers: dict[str, Answer] = {}
        self.timer: Timer | None = None
        self.knock: Timer | None = None


class Collectives:
    """The gatherings that this worker takes part in or collects."""

    def __init__(self, owner: CollectivesOwner) -> None:
        self._owner = owner
        self._lock = threading.Lock()  # protects the two below
        self._rounds: dict[tuple[str, tuple[str, ...]], int] = {}
        self._meetings: dict[str, _Meeting] = {}

    def gather(
        self, value: object, names: Sequence[str] | None = None, *, timeout: float | None, topic: str = "user"
    ) -> dict[str, Any]:
        """Bring `value`, and get the values of all `names` (everybody, if None), which must all call this.

        With the topic "shutdown" workers that are gone are left out instead of failing the gathering.
        """
        owner = self._owner
        members = [peer for peer in owner.peers.all() if names is None or peer.record.name in names]
        unknown = set(names or ()) - {peer.record.name for peer in members}
        for name in unknown:
            owner.peers.find(name)  # raises the error that lists the known ones
        mine = owner.me.name
        if mine not in {peer.record.name for peer in members}:
            raise ValueError(f"worker {mine!r} is not among {sorted(names or ())}, so it cannot take part")
        everybody = tuple(peer.record.name for peer in members)
        with self._lock:
            number = self._rounds[topic, everybody] = self._rounds.get((topic, everybody), 0) + 1
        key = f"{topic}/{number}/{','.join(everybody)}"
        if topic != "shutdown":
            collector = everybody[0]
            values: dict[str, Any] = owner.call(collector, SERVICE, (key, everybody, mine, value, timeout), timeout=0.0)
            return {name: values[name] for name in everybody}
        while True:
            present = [peer.record.name for peer in members if not peer.gone]
            try:
                return dict(owner.call(present[0], SERVICE, (key, everybody, mine, value, timeout), timeout=0.0))
            except WorkerLost:
                # Only the loss of the collector leads on: the next one takes over.
                if not owner.peers.find(present[0]).gone:
                    raise

    def arrive(
        self, answer: Answer, key: str, everybody: tuple[str, ...], name: str, value: object, timeout: float | None
    ) -> None:
        """A member came. Answered when all have."""
        with self._lock:
            meeting = self._meetings.get(key)
            if meeting is None:
                meeting = self._meetings[key] = _Meeting(set(everybody))
                if timeout:
                    when = self._owner.runtime.now() + timeout
                    meeting.timer = self._owner.executor.timers.at(when, lambda: self._too_late(key, timeout))
                meeting.knock = self._owner.executor.timers.at(
                    self._owner.runtime.now() + _PATIENCE, lambda: self._knock(key)
                )
            meeting.values[name] = value
            meeting.answers[name] = answer
        self._look(key)

    def peer_gone(self, peer: Peer) -> None:
        """A worker will never come."""
        with self._lock:
            keys = list(self._meetings)
        for key in keys:
            self._look(key)

    def _look(self, key: str) -> None:
        """Answer everybody if all have come, or if one that must come never will."""
        gone = {peer.record.name: peer.gone for peer in self._owner.peers.all() if peer.gone}
        with self._lock:
            meeting = self._meetings.get(key)
            if meeting is None:
                return
            missing = meeting.expected - set(meeting.values)
            if key.startswith("shutdown/"):
                missing -= set(gone)
            error: Exception | None = None
            lost = sorted(missing & set(gone))
            if lost:
                error = WorkerLost(f"worker {lost[0]!r} is gone ({gone[lost[0]]}), so not all can come", worker=lost[0])
            elif missing:
                return
            del self._meetings[key]
        self._answer(meeting, error)

    def _knock(self, key: str) -> None:
        """Connect to those that have not come: a worker that nobody has a connection with may die unnoticed."""
        with self._lock:
            meeting = self._meetings.get(key)
            missing = set() if meeting is None else meeting.expected - set(meeting.values)
        for peer in self._owner.peers.all():
            if peer.record.name in missing and not peer.gone and not peer.channels():
                self._owner.executor.submit(partial(self._knock_at, peer), urgent=True)

    def _knock_at(self, peer: Peer) -> None:
        try:
            self._owner.peers.connector.channel_to(peer, self._owner.runtime.now() + _KNOCK)
        except TelegradError as error:  # if it is lost, everybody who waits for it has been told
            _log.debug("worker %r, which has not come, cannot be connected to: %s", peer.record.name, error)

    def _too_late(self, key: str, timeout: float) -> None:
        with self._lock:
            meeting = self._meetings.pop(key, None)
        if meeting is not None:
            missing = sorted(meeting.expected - set(meeting.values))
            names = ", ".join(map(repr, missing))
            what = "has not called shutdown()" if key.startswith("shutdown/") else "did not come"
            self._answer(
                meeting,
                DeadlineExceeded(f"after {timeout:g} s worker {names} {what}", worker=missing[0], elapsed=timeout),
            )

    def _answer(self, meeting: _Meeting, error: Exception | None) -> None:
        for timer in (meeting.timer, meeting.knock):
            if timer is not None:
                self._owner.executor.timers.cancel(timer)
        # This worker last: when it hears that all have come it may leave, and the others must have their answers then.
        for name in sorted(meeting.answers, key=lambda name: name == self._owner.me.name):
            meeting.answers[name](meeting.values, error)
