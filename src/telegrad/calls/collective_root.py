"""The root of collectives: collects the values of the members, and answers all of them when it has the last one.

A collective is identified by its topic, its *view* (who takes part, each in which incarnation) and its number in this
view. So after a worker was replaced the numbers begin at 1 for everybody, and values of two incarnations are never
mixed. Members may know different groups for a while. The root decides by what it knows itself:

1. A member of the view is gone or was replaced: the collective fails with WorkerLost, and so does whoever comes with
   such a view. They try again when they have learned of the replacement.
2. The view has a worker or an incarnation that the root does not know: it waits for AGREE seconds to learn of it, and
   then fails the collective with GroupsDiffer.
3. Somebody has joined since the members of a collective of the whole group began it: it fails with GroupsDiffer,
   because those that are still to come wait for the newcomer, too.
4. A member that is missing is in a later round already, because its call failed: the collective fails. Whoever comes
   to a round that has failed gets the same error.

The rounds of a shutdown have no view: the root waits for all workers that it holds for alive, and if a launcher starts
dead workers again, for some time for those. See `telegrad.calls.collectives` for what happens when it leaves.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from telegrad.connection.local_worker import LocalWorker
from telegrad.connection.peers import Peer, Peers
from telegrad.errors import CallCancelled, DeadlineExceeded, GroupsDiffer, TelegradError, WorkerLost
from telegrad.execution.timers import Timer
from telegrad.waiting_report import workers

_log = logging.getLogger("telegrad")

SHUTDOWN = "shutdown"
"""The topic of the rounds of a graceful shutdown."""
AGREE = 10.0
"""Seconds within which the root must have learned of the workers that a member names."""
_CHECK = 1.0  # seconds between two looks at the members that are missing
_PROBE = 60.0  # seconds for a connection to one of them: more than a session tries, so that it is lost in the end
_MAX_FAILED = 1024  # views whose last failed round is remembered

Respond = Callable[[object, Exception | None], None]

View = tuple[tuple[str, int, int], ...]
"""The members of a collective: name, generation and incarnation, by id."""


class Round(NamedTuple):
    """Identifies one collective."""

    topic: str
    number: int
    view: View


class Arrival(NamedTuple):
    """What a member says about the collective that it is in."""

    round: Round
    name: str
    value: object
    timeout: float | None
    whole: bool
    """Whether it asked for the whole group, rather than for certain workers."""
    oldest: int
    """The lowest number of a collective of this view that it is in; it will come to no lower one."""


class _Collective:
    def __init__(self, first: Arrival, now: float) -> None:
        self.expected = {name for name, _, _ in first.round.view}
        self.whole = first.whole
        self.began = now
        self.values: dict[str, Any] = {}
        self.answers: dict[str, Respond] = {}
        self.timer: Timer | None = None
        self.check: Timer | None = None


class CollectiveRoot:
    """The collectives that this worker is the root of."""

    def __init__(self, local: LocalWorker, peers: Peers) -> None:
        self._local = local
        self._peers = peers
        self._lock = threading.Lock()  # protects the three below
        self._pending: dict[Round, _Collective] = {}
        self._failed: dict[tuple[str, View], tuple[int, Exception]] = {}  # the last failed round of a view, and why
        self._latest = 0  # the latest round of a shutdown that a worker has begun here

    def arrive(self, answer: Respond, arrival: Arrival) -> None:
        """Take the value of a member, and reply when all values have arrived."""
        key, now, timers = arrival.round, self._local.runtime.now(), self._local.executor.timers
        if key.topic == SHUTDOWN and not self._begin_shutdown_round(key.number):
            answer({}, None)
            return
        with self._lock:
            number, error = self._failed.get((key.topic, key.view), (0, None))
            skipped = [] if key.topic == SHUTDOWN else self._skipped(arrival)
            collective = self._pending.get(key)
            if collective is None and number < key.number:
                collective = self._pending[key] = _Collective(arrival, now)
                if arrival.timeout:
                    when = now + arrival.timeout
                    collective.timer = timers.at(when, partial(self._too_late, key, arrival.timeout))
                collective.check = timers.at(now + _CHECK, partial(self._check, key))
            if collective is not None:
                collective.values[arrival.name] = arrival.value
                collective.answers[arrival.name] = answer
        for each in skipped:
            text = f"worker {arrival.name!r} gave up this collective, so not all workers can take part"
            self._fail(each, CallCancelled(text, worker=arrival.name))
        if collective is None:  # it has failed
            answer(None, error)
        else:
            self._look(key)

    def _skipped(self, arrival: Arrival) -> list[Round]:
        """Return the collectives that a member will not come to, because its calls failed or were cancelled."""
        topic, _, view = arrival.round
        return [
            key
            for key, collective in self._pending.items()
            if (key.topic, key.view) == (topic, view)
            and key.number < arrival.oldest
            and arrival.name not in collective.values
        ]

    def _begin_shutdown_round(self, number: int) -> bool:
        """Return whether a round of a shutdown is the latest one. If it is a new one, the round before is over."""
        with self._lock:
            latest = self._latest
            self._latest = max(latest, number)
            missed = self._pending.pop(Round(SHUTDOWN, latest, ()), None) if number > latest else None
        if missed is not None:
            self._answer(missed, {}, None)
        return number >= latest

    def missing(self, key: Round) -> list[str]:
        """Return the members that a collective waits for."""
        peers = self._peers.all()
        with self._lock:
            collective = self._pending.get(key)
            return [] if collective is None else sorted(self._missing(key, collective, peers))

    def _missing(self, key: Round, collective: _Collective, peers: list[Peer]) -> set[str]:
        if key.topic == SHUTDOWN:
            return {peer.record.name for peer in peers if not peer.gone or self._returns(peer)} - set(collective.values)
        return collective.expected - set(collective.values)

    def _returns(self, peer: Peer) -> bool:
        """Return whether a worker that is gone is about to be started again, by the launcher."""
        awaited = self._local.settings.awaited_replacement
        return peer.failed_at is not None and self._local.runtime.now() < peer.failed_at + awaited

    def group_changed(self) -> None:
        """Look at all collectives again: a worker is gone, or was replaced, or has joined."""
        with self._lock:
            keys = list(self._pending)
        for key in keys:
            self._look(key)

    def _look(self, key: Round) -> None:
        """Reply to all members if all values have arrived, or if one never will."""
        if self._local.closed:  # the others find this worker gone, and ask the next root
            return
        peers, now = self._peers.all(), self._local.runtime.now()
        error: Exception | None = None
        with self._lock:
            collective = self._pending.get(key)
            if collective is None:
                return
            if self._missing(key, collective, peers):
                error = None if key.topic == SHUTDOWN else _obstacle(key.view, collective, peers, now)
                if error is None:
                    return
            else:
                del self._pending[key]
        if error is None:
            self._answer(collective, collective.values, None)
        else:
            self._fail(key, error)

    def _check(self, key: Round) -> None:
        """Look again, and connect to members without a connection: one of them may have died unnoticed."""
        self._look(key)
        peers, timers = self._peers.all(), self._local.executor.timers
        root = next((peer.record.name for peer in peers if not peer.gone), self._local.name)
        with self._lock:
            collective = self._pending.get(key)
            if collective is None:
                return
            is_root = key.topic != SHUTDOWN or root == self._local.name
            if not is_root:
                del self._pending[key]
        if not is_root:  # a worker with a lower id was replaced, so the members have to ask that one
            self._answer(collective, None, None)
            return
        with self._lock:
            members = self._missing(key, collective, peers) | set(collective.values)
            collective.check = timers.at(self._local.runtime.now() + _CHECK, partial(self._check, key))
        for peer in peers:
            # A worker that opened a connection here and died is lost sooner if it refuses one.
            connected = peer.outgoing or peer.opening or (peer.incoming is not None and peer.incoming.link)
            if peer.record.name in members and not peer.gone and not connected:
                self._local.executor.submit(partial(self._connect, peer), urgent=True)

    def _connect(self, peer: Peer) -> None:
        try:
            self._peers.connector.channel_to(peer, self._local.runtime.now() + _PROBE)
        except TelegradError as error:  # if it is lost, those that wait for it have been told
            _log.debug("cannot connect to worker %r, which has not joined the collective: %s", peer.record.name, error)

    def _too_late(self, key: Round, timeout: float) -> None:
        missing = self.missing(key)
        if missing:
            have = "has" if len(missing) == 1 else "have"
            what = f"{have} not called shutdown()" if key.topic == SHUTDOWN else "did not join the collective"
            text = f"after {timeout:g} s {workers(missing)} {what}"
            self._fail(key, DeadlineExceeded(text, worker=missing[0], elapsed=timeout))

    def _fail(self, key: Round, error: Exception) -> None:
        with self._lock:
            collective = self._pending.pop(key, None)
            if collective is not None and key.topic != SHUTDOWN:
                number, _ = self._failed.pop((key.topic, key.view), (0, None))
                self._failed[key.topic, key.view] = (max(number, key.number), error)
                if len(self._failed) > _MAX_FAILED:
                    del self._failed[next(iter(self._failed))]
        if collective is not None:
            self._answer(collective, None, error)

    def _answer(self, collective: _Collective, values: dict[str, Any] | None, error: Exception | None) -> None:
        for timer in (collective.timer, collective.check):
            if timer is not None:
                self._local.executor.timers.cancel(timer)
        # This worker last: once it has its reply it may leave, and by then the others must have theirs.
        for name in sorted(collective.answers, key=lambda name: name == self._local.name):
            collective.answers[name](values, error)


def _obstacle(view: View, collective: _Collective, peers: list[Peer], now: float) -> Exception | None:
    """Return why the members of a view will not all come, if that is known here."""
    known, unknown = {peer.record.name: peer for peer in peers}, []
    for name, generation, incarnation in view:
        peer = known.get(name)
        if peer is None or peer.record.generation < generation:
            unknown.append(name)
        elif peer.record.generation > generation:
            text = f"worker {name!r} was replaced, so not all workers can take part. Call it again"
            return WorkerLost(text, worker=name)
        elif peer.record.incarnation != incarnation:
            unknown.append(name)
        elif peer.gone:
            return WorkerLost(f"worker {name!r} is gone ({peer.gone}), so not all workers can take part", worker=name)
    if unknown:
        if now < collective.began + AGREE:
            return None
        return GroupsDiffer(
            f"{workers(sorted(collective.values))} did a collective with {workers(unknown)}, whom the worker that "
            f"collects the values has not heard of within {AGREE:g} s"
        )
    joined = [peer.record.name for peer in peers if not peer.gone and peer.record.name not in collective.expected]
    if collective.whole and joined:
        return GroupsDiffer(
            f"{workers(joined)} joined the group while {workers(sorted(collective.values))} waited in a collective of "
            f"all workers, which did not include {'it' if len(joined) == 1 else 'them'}. Call it again"
        )
    return None
