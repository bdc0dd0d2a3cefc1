"""Collectives: the barrier, all_gather, and the rounds of a graceful shutdown.

The member with the lowest id is the root. Each member calls it with its value, and it answers all of them when the last
value has arrived.

A shutdown goes on without workers that are gone, in rounds with the same numbers on all workers. If the root itself
leaves, the members ask the next one for the same round. The root may have answered some of them, who then are in the
next round. So a root that is asked for a round when another worker has begun a later one answers that the round is
over: nobody will complete it, and whoever asked goes on to the next round, too. A root that is closing answers nobody.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from telegrad.calls.call import current_served
from telegrad.connection.channel import Channel
from telegrad.connection.local_worker import LocalWorker
from telegrad.connection.peers import Peer, Peers
from telegrad.errors import DeadlineExceeded, NotInitialized, ProtocolError, TelegradError, WorkerLost
from telegrad.execution.timers import Timer

_log = logging.getLogger("telegrad")

SERVICE = "@telegrad.gather"
SHUTDOWN = "shutdown"
"""The topic of the rounds of a graceful shutdown."""
_PROBE_AFTER = 1.0  # seconds after which missing members are probed
_PROBE = 60.0  # seconds for that: more than a session tries, so that an unreachable member is lost in the end
_LONGEST = 1e9  # seconds

Respond = Callable[[object, Exception | None], None]
CallWorker = Callable[..., Any]


def _key(topic: str, number: int, everybody: tuple[str, ...]) -> str:
    return f"{topic}/{number}/{','.join(everybody)}"


class _Collective:
    def __init__(self, expected: set[str]) -> None:
        self.expected = expected
        self.values: dict[str, Any] = {}
        self.answers: dict[str, Respond] = {}
        self.timer: Timer | None = None
        self.probe: Timer | None = None


class Collectives:
    """The collectives that this worker takes part in, or is the root of."""

    def __init__(self, local: LocalWorker, peers: Peers, call: CallWorker) -> None:
        self._local = local
        self._peers = peers
        self._call = call
        self._lock = threading.Lock()  # protects the three below
        self._rounds: dict[tuple[str, tuple[str, ...]], int] = {}
        self._pending: dict[str, _Collective] = {}
        self._latest: dict[tuple[str, ...], int] = {}  # the latest round of a shutdown that a worker has begun here

    def gather(
        self, value: object, names: Sequence[str] | None = None, *, timeout: float | None, topic: str = "user"
    ) -> dict[str, Any]:
        """Contribute `value`, and return the values of all `names` (default: all workers), which must all call this.

        With the topic "shutdown", workers that are gone are left out instead of failing the collective. The result is
        empty if the other workers are in a later round, because the root left before it had answered everybody.
        """
        members = [peer for peer in self._peers.all() if names is None or peer.record.name in names]
        unknown = set(names or ()) - {peer.record.name for peer in members}
        for name in unknown:
            self._peers.find(name)  # raises the error that lists the known ones
        mine = self._local.name
        if mine not in {peer.record.name for peer in members}:
            raise ValueError(f"worker {mine!r} is not among {sorted(names or ())}, so it cannot take part")
        everybody = tuple(peer.record.name for peer in members)
        with self._lock:
            number = self._rounds[topic, everybody] = self._rounds.get((topic, everybody), 0) + 1
        key = _key(topic, number, everybody)
        if topic != SHUTDOWN:
            root = everybody[0]
            values = self._call(root, SERVICE, (key, everybody, mine, value, timeout), timeout=0.0)
            if type(values) is not dict or not values.keys() >= set(everybody):
                raise ProtocolError(f"worker {root!r} did not send the values of all workers of a collective")
            return {name: values[name] for name in everybody}
        while True:
            present = [peer.record.name for peer in members if not peer.gone]
            if not present:
                raise NotInitialized(f"worker {mine!r} cannot take part in a shutdown: {self._local.closed}")
            try:
                return dict(self._call(present[0], SERVICE, (key, everybody, mine, value, timeout), timeout=0.0))
            except WorkerLost:
                # Go on only if the root was lost: the next worker takes over.
                if not self._peers.find(present[0]).gone:
                    raise

    def arrive(
        self, answer: Respond, key: str, everybody: tuple[str, ...], name: str, value: object, timeout: float | None
    ) -> None:
        """Take the value of a member, and reply when all values have arrived."""
        self._check_arrival(key, everybody, name, timeout)
        if key.startswith(f"{SHUTDOWN}/") and not self._begin_round(key, everybody):
            answer({}, None)
            return
        with self._lock:
            collective = self._pending.get(key)
            if collective is None:
                collective = self._pending[key] = _Collective(set(everybody))
                if timeout:
                    when = self._local.runtime.now() + timeout
                    collective.timer = self._local.executor.timers.at(when, lambda: self._too_late(key, timeout))
                collective.probe = self._local.executor.timers.at(
                    self._local.runtime.now() + _PROBE_AFTER, lambda: self._probe(key)
                )
            collective.values[name] = value
            collective.answers[name] = answer
        self._look(key)

    def _begin_round(self, key: str, everybody: tuple[str, ...]) -> bool:
        """Return whether a round of a shutdown is the latest one. If it is a new one, the round before is over."""
        number = int(key.split("/")[1])
        with self._lock:
            latest = self._latest.get(everybody, 0)
            self._latest[everybody] = max(latest, number)
            missed = self._pending.pop(_key(SHUTDOWN, latest, everybody), None) if number > latest else None
        if missed is not None:
            missed.values = {}
            self._answer(missed, None)
        return number >= latest

    def _check_arrival(self, key: object, everybody: object, name: object, timeout: object) -> None:
        """Raise unless these are what the worker `name`, which sends them, may say."""
        served = current_served.get()
        if served is None:
            return  # no request: called on this worker
        members = everybody if type(everybody) is tuple and {str}.issuperset(map(type, everybody)) else ()
        parts = key.split("/") if type(key) is str else []
        known = {peer.record.name for peer in self._peers.all()}
        if (
            name != served.caller
            or name not in members
            or not known.issuperset(members)
            or len(parts) != 3
            or not (parts[1].isdecimal() and len(parts[1]) < 10)
            or parts[2] != ",".join(members)
            or not (timeout is None or (isinstance(timeout, int | float) and 0 <= timeout < _LONGEST))
        ):
            raise ProtocolError(f"worker {served.caller!r} sent a malformed message of a collective")

    def peer_lost(self, peer: Peer, channels: list[Channel], reason: str) -> None:
        """Fail the collectives that wait for a worker which is gone."""
        with self._lock:
            keys = list(self._pending)
        for key in keys:
            self._look(key)

    def _look(self, key: str) -> None:
        """Reply to all members if all values have arrived, or if one never will."""
        if self._local.closed:  # the others find this worker gone, and ask the next root
            return
        gone = {peer.record.name: peer.gone for peer in self._peers.all() if peer.gone}
        with self._lock:
            collective = self._pending.get(key)
            if collective is None:
                return
            missing = collective.expected - set(collective.values)
            if key.startswith(f"{SHUTDOWN}/"):
                missing -= set(gone)
            error: Exception | None = None
            lost = sorted(missing & set(gone))
            if lost:
                error = WorkerLost(
                    f"worker {lost[0]!r} is gone ({gone[lost[0]]}), so not all workers can take part", worker=lost[0]
                )
            elif missing:
                return
            del self._pending[key]
        self._answer(collective, error)

    def _probe(self, key: str) -> None:
        """Connect to missing members: a worker that nobody has a connection with may die unnoticed."""
        with self._lock:
            collective = self._pending.get(key)
            missing = set() if collective is None else collective.expected - set(collective.values)
        for peer in self._peers.all():
            if peer.record.name in missing and not peer.gone and not peer.channels():
                self._local.executor.submit(partial(self._connect, peer), urgent=True)

    def _connect(self, peer: Peer) -> None:
        try:
            self._peers.connector.channel_to(peer, self._local.runtime.now() + _PROBE)
        except TelegradError as error:  # if it is lost, those that wait for it have been told
            _log.debug("cannot connect to worker %r, which has not joined the collective: %s", peer.record.name, error)

    def _too_late(self, key: str, timeout: float) -> None:
        with self._lock:
            collective = self._pending.pop(key, None)
        if collective is not None:
            missing = sorted(collective.expected - set(collective.values))
            names = ", ".join(map(repr, missing))
            what = "has not called shutdown()" if key.startswith(f"{SHUTDOWN}/") else "did not join the collective"
            self._answer(
                collective,
                DeadlineExceeded(f"after {timeout:g} s worker {names} {what}", worker=missing[0], elapsed=timeout),
            )

    def _answer(self, collective: _Collective, error: Exception | None) -> None:
        for timer in (collective.timer, collective.probe):
            if timer is not None:
                self._local.executor.timers.cancel(timer)
        # This worker last: once it has its reply it may leave, and by then the others must have theirs.
        for name in sorted(collective.answers, key=lambda name: name == self._local.name):
            collective.answers[name](collective.values, error)
