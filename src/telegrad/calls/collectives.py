"""Collectives: the barrier, all_gather, and the rounds of a graceful shutdown.

The member with the lowest id is the root (`telegrad.calls.collective_root`). Each member calls it with its value, and
it answers all of them when the last value has arrived. Whoever waits for long asks the root for whom, and logs it.

A shutdown goes on without workers that are gone, in rounds with the same numbers on all workers. If the root itself
leaves, the members ask the next one for the same round. The root may have answered some of them, who then are in the
next round. So a root that is asked for a round when another worker has begun a later one answers that the round is
over: nobody will complete it, and whoever asked goes on to the next round, too. A root that is closing answers nobody.
If a worker with a lower id takes the place of one that was lost, it becomes the root: the one before sends the members
away, and they ask again.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from telegrad.calls.call import current_served
from telegrad.calls.collective_root import SHUTDOWN, Arrival, CollectiveRoot, Respond, Round, View
from telegrad.connection.channel import Channel
from telegrad.connection.local_worker import LocalWorker
from telegrad.connection.peers import Peer, Peers
from telegrad.errors import NotInitialized, ProtocolError, TelegradError, WorkerLost
from telegrad.execution.reported_wait import ReportedWait
from telegrad.waiting_report import WaitingReport, seconds, workers

_log = logging.getLogger("telegrad")

SERVICE = "@telegrad.gather"
USER = "user"
"""The topic of the collectives of the program."""
_ASK = 2.0  # seconds for the root to say whom it waits for
_PAUSE = 0.1  # seconds before another worker is asked, if one is not the root
_SLACK = 5.0  # seconds after the timeout of a collective within which the root must have answered
_LONGEST = 1e9  # seconds

CallWorker = Callable[..., Any]


class Collectives:
    """The collectives that this worker takes part in, or is the root of."""

    def __init__(self, local: LocalWorker, peers: Peers, call: CallWorker) -> None:
        self._local = local
        self._peers = peers
        self._call = call
        self.root = CollectiveRoot(local, peers)
        self._lock = threading.Lock()  # protects the three below
        self._numbers: dict[View, int] = {}
        self._in_flight: dict[View, set[int]] = {}
        self._shutdown_rounds = 0

    # -- members ----------------------------------------------------------------------------------------------

    def gather(
        self, value: object, names: Sequence[str] | None = None, *, timeout: float | None, what: str = "all_gather()"
    ) -> dict[str, Any]:
        """Contribute `value`, and return the values of all `names` (default: all workers), which must all call this.

        `timeout` is in seconds; None and 0 mean no limit. `what` is the function that logs say the worker waits in.
        """
        members = self._members(names)
        view = tuple((peer.record.name, peer.record.generation, peer.record.incarnation) for peer in members)
        root = members[0].record.name
        with self._lock:
            if view not in self._numbers:
                self._forget_old_views()
            number = self._numbers[view] = self._numbers.get(view, 0) + 1
            in_flight = self._in_flight.setdefault(view, set())
            in_flight.add(number)
            oldest = min(in_flight)
        key = Round(USER, number, view)
        deadline = timeout + _SLACK if timeout else 0.0
        try:
            with self._reported(root, key, what):
                values = self._call(root, SERVICE, (*key, value, timeout, names is None, oldest), timeout=deadline)
        finally:
            with self._lock:
                in_flight.discard(number)
                if not in_flight:
                    del self._in_flight[view]
        everybody = [peer.record.name for peer in members]
        if type(values) is not dict or not values.keys() >= set(everybody):
            raise ProtocolError(f"worker {root!r} did not send the values of all workers of a collective")
        return {name: values[name] for name in everybody}

    def _members(self, names: Sequence[str] | None) -> list[Peer]:
        mine, peers = self._local.name, self._peers.all()
        if names is None:
            # In an open group workers come and go; in a fixed one, those that are gone have to be replaced.
            return [peer for peer in peers if not (self._peers.members.is_open and peer.gone)]
        members = [peer for peer in peers if peer.record.name in names]
        for name in set(names) - {peer.record.name for peer in members}:
            self._peers.find(name)  # raises the error that lists the known ones
        if mine not in {peer.record.name for peer in members}:
            raise ValueError(f"worker {mine!r} is not among {sorted(names)}, so it cannot take part")
        return members

    def _forget_old_views(self) -> None:
        """Forget the numbers in views of which a member was replaced or has left: they do not return."""
        alive = {
            (peer.record.name, peer.record.generation, peer.record.incarnation)
            for peer in self._peers.all()
            if not peer.left
        }
        for view in [view for view in self._numbers if view not in self._in_flight and not alive.issuperset(view)]:
            del self._numbers[view]

    def shutdown_round(self, value: object, timeout: float | None, schedule: WaitingReport) -> dict[str, Any]:
        """Contribute `value` to the next round of the shutdown, and return those of all workers that are not gone.

        The result is empty if the other workers are in a later round, because the root left before it had answered
        everybody. `schedule` is that of the reports of the whole shutdown.
        """
        runtime, mine = self._local.runtime, self._local.name
        deadline = runtime.now() + timeout if timeout else None
        with self._lock:
            self._shutdown_rounds += 1
            key = Round(SHUTDOWN, self._shutdown_rounds, ())
        while True:
            present = [peer for peer in self._peers.all() if not peer.gone]
            if not present:
                raise NotInitialized(f"worker {mine!r} cannot take part in a shutdown: {self._local.closed}")
            root = present[0].record.name
            left = None if deadline is None else max(0.01, deadline - runtime.now())
            try:
                with self._reported(root, key, "shutdown()", schedule):
                    values = self._call(root, SERVICE, (*key, value, left, True, key.number), timeout=0.0)
            except WorkerLost:
                # Go on only if the root was lost: the next worker takes over, or its replacement.
                if not present[0].gone:
                    raise
                continue
            if type(values) is dict:
                return values
            if values is not None:
                raise ProtocolError(f"worker {root!r} did not send the values of a round of the shutdown")
            if deadline is not None and runtime.now() >= deadline:
                return {}
            runtime.event().wait(runtime.now() + _PAUSE)  # until this worker knows of the root, too

    # -- reports ----------------------------------------------------------------------------------------------

    def _reported(self, root: str, key: Round, what: str, schedule: WaitingReport | None = None) -> ReportedWait:
        local = self._local

        def report(elapsed: float) -> None:
            local.executor.submit(partial(self._report, wait, root, key, what, elapsed))

        wait = ReportedWait(local.runtime, local.executor, report, schedule)
        return wait

    def _report(self, wait: ReportedWait, root: str, key: Round, what: str, elapsed: float) -> None:
        """Log whom a collective waits for, on a worker thread."""
        waits_for = f"worker {root!r}, which collects the values and does not answer"
        try:
            missing = self.root.missing(key) if root == self._local.name else self._ask(root, key)
        except TelegradError as error:
            _log.debug("worker %r cannot ask worker %r whom a collective waits for: %s", self._local.name, root, error)
        else:
            if not missing:  # it has just ended
                return
            waits_for = workers(missing)
            if key.topic == SHUTDOWN:
                waits_for += f", which {'has' if len(missing) == 1 else 'have'} not called it or still run calls"
        if not wait.over:
            _log.warning("worker %r has waited %s in %s for %s", self._local.name, seconds(elapsed), what, waits_for)

    def _ask(self, root: str, key: Round) -> list[str]:
        missing = self._call(root, SERVICE, tuple(key), timeout=_ASK)
        known = {peer.record.name for peer in self._peers.all()}
        if not isinstance(missing, list) or not known.issuperset(map(str, missing)):
            raise ProtocolError(f"worker {root!r} does not say which workers a collective waits for")
        return missing

    # -- the root ---------------------------------------------------------------------------------------------

    def arrive(self, answer: Respond, topic: object, number: object, view: object, *rest: object) -> None:
        """Serve a member: take its value, or without one, say whom its collective waits for."""
        served = current_served.get()
        caller = self._local.name if served is None else served.caller
        incarnation = self._local.me.incarnation if served is None else served.worker.incarnation
        key = _round_of(topic, number, view)
        if key is None or (rest and len(rest) != 4):
            raise ProtocolError(f"worker {caller!r} sent a malformed message of a collective")
        if not rest:
            answer(self.root.missing(key), None)
            return
        value, timeout, whole, oldest = rest
        if (
            (topic == USER and (caller, incarnation) not in [(name, number) for name, _, number in key.view])
            or not (timeout is None or (isinstance(timeout, int | float) and 0 <= timeout < _LONGEST))
            or type(whole) is not bool
            or not (type(oldest) is int and 1 <= oldest <= key.number)
            or not (self._peers.members.is_open or self._known().issuperset(name for name, _, _ in key.view))
        ):
            raise ProtocolError(f"worker {caller!r} sent a malformed message of a collective")
        self.root.arrive(answer, Arrival(key, caller, value, timeout, whole, oldest))

    def _known(self) -> set[str]:
        return {peer.record.name for peer in self._peers.all()}

    def peer_lost(self, peer: Peer, channels: list[Channel], reason: str) -> None:
        """Fail the collectives that wait for a worker which is gone."""
        self.root.group_changed()


def _round_of(topic: object, number: object, view: object) -> Round | None:
    """Return the collective that a member names; None if that is malformed."""
    if topic not in (USER, SHUTDOWN) or not (type(number) is int and 1 <= number < _LONGEST):
        return None
    if type(view) is not tuple or bool(view) is not (topic == USER):
        return None
    for entry in view:
        if type(entry) is not tuple or [type(part) for part in entry] != [str, int, int]:
            return None
    return Round(str(topic), number, view)
