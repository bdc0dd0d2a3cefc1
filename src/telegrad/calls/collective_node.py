"""The collectives of a program at one member: collects the values from below, passes them on, and answers.

A collective is identified by its topic, its *view* (who takes part, each in which incarnation) and its number in this
view. So after a worker was replaced the numbers begin at 1 for everybody, and values of two incarnations are never
mixed. The members of a view form a tree (`telegrad.protocol.collective_tree`):

1. When somebody at or below a member comes, it *enters* at the one above it. When all have come, it sends their values
   there. The root, which is the first member, then has the values of all. The outcome goes back down as the answers.
2. A collective that fails at one member fails everywhere: the member tells the one above it, and the outcome reaches
   all others that have entered. Whoever comes later gets the same error.

Members may know different groups for a while. Each decides by what it knows itself:

3. A member of the view is gone or was replaced: the collective fails with WorkerLost, and so does whoever comes with
   such a view. They try again when they have learned of the replacement.
4. The view has a worker or an incarnation that it does not know: it waits for AGREE seconds to learn of it, and then
   fails the collective with GroupsDiffer.
5. Somebody has joined since the members of a collective of the whole group began it: it fails with GroupsDiffer,
   because those that are still to come wait for the newcomer, too.
6. A member that is missing is in a later round already, because its call failed: the collective fails.
7. A value cannot be pickled, or not be unpickled where it is collected: the member it comes from tells the one above it
   that the collective has failed.
"""

from __future__ import annotations

import logging
import threading
from functools import partial
from typing import Any

from telegrad.calls.collective_kinds import function_of
from telegrad.calls.collective_messages import (
    Arrival,
    CallUp,
    Expire,
    PendingRound,
    Respond,
    Round,
    Stage,
    WaitsFor,
    failure,
    from_plain,
    may_be_unheard_of,
    not_passed_on,
)
from telegrad.calls.collective_view import KnownView
from telegrad.connection.local_worker import LocalWorker
from telegrad.connection.peer_table import Peer
from telegrad.connection.peers import Peers
from telegrad.errors import (
    CallCancelled,
    GroupsDiffer,
    ProtocolError,
    TelegradError,
    WorkerLost,
)
from telegrad.execution.timers import Timer
from telegrad.protocol.collective_tree import static_children, static_parent, subtree
from telegrad.waiting_report import workers

_log = logging.getLogger("telegrad")

AGREE = 10.0
"""Seconds within which a member must have learned of the workers that another names."""
CHECK = 1.0
"""Seconds between two looks at the members that are missing."""
_PROBE = 60.0  # seconds for a connection to one of them: more than a session tries, so that it is lost in the end
_MAX_REMEMBERED = 1024  # views of which it is remembered how rounds ended


class _Collective:
    def __init__(self, first: Arrival, mine: str, fan_out: int, now: float) -> None:
        self.known = known = first.known
        self.place = place = known.places[mine]
        self.children = [known.name(child) for child in static_children(place, len(known.view), fan_out)]
        self.missing = {mine, *self.children}
        """Whose values have not come."""
        self.parent = known.name(static_parent(place, fan_out)) if place else None
        self.whole = first.whole
        self.timeout = first.timeout
        self.began = now
        self.values: dict[str, Any] = {}
        """The values that are not None, of all members that have come."""
        self.answers: list[tuple[str, Stage, Respond]] = []
        self.passed_on = False
        self.is_told = False
        """Whether the member above was told that it has failed."""
        self.timer: Timer | None = None
        self.check: Timer | None = None


class CollectiveNode:
    """The collectives of which this worker is a member that others are below."""

    def __init__(self, local: LocalWorker, peers: Peers, call_up: CallUp, expire: Expire) -> None:
        self._local = local
        self.name = local.name
        self._peers = peers
        self._call_up = call_up
        self._expire = expire
        self._fan_out = local.settings.fan_out
        self._lock = threading.Lock()  # protects the four below
        self._pending: dict[Round, _Collective] = {}
        self._failed: dict[bytes, tuple[int, Exception]] = {}  # the last failed round of a view, and why
        self._ended: dict[bytes, int] = {}  # the last round of a view that ended well
        self._oldest: dict[bytes, dict[str, int]] = {}  # the lowest round that each member may still come to

    def arrive(self, answer: Respond, arrival: Arrival) -> None:
        """Take what a member says, and answer when the collective has ended."""
        key, stage, now, timers = arrival.round, arrival.stage, self._local.runtime.now(), self._local.executor.timers
        self._check_sender(arrival)
        if stage is Stage.FAILED:
            malformed = f"worker {arrival.name!r} sent a malformed error of a collective"
            self.fail(key, arrival.known, from_plain(arrival.value) or ProtocolError(malformed))
            answer(None, None)
            return
        with self._lock:
            number, error = self._failed.get(key.digest, (0, None))
            skipped = self._skipped(arrival)
            collective = self._pending.get(key)
            is_new = False
            is_late = stage is Stage.ENTER and key.number <= self._ended.get(key.digest, 0)
            if collective is None and number < key.number and not is_late:
                is_new = True
                collective = self._pending[key] = _Collective(arrival, self._local.name, self._fan_out, now)
                if arrival.timeout:
                    what = function_of(arrival.value) if stage is Stage.VALUE else "the collective"
                    expire = partial(self._expire, key, what, arrival.timeout, partial(self.fail, key, arrival.known))
                    collective.timer = timers.at(now + arrival.timeout, expire)
                collective.check = timers.at(now + CHECK, partial(self._check, key))
                oldest = self._oldest.get(key.digest, {})
                if any(oldest.get(name, 0) > key.number for name in collective.missing):
                    skipped.append(key)
            if collective is not None:
                collective.answers.append((arrival.name, stage, answer))
                if stage is not Stage.ENTER:
                    collective.missing.discard(arrival.name)
                    collective.values |= _values_of(arrival)
            is_due = is_new or (collective is not None and not collective.missing)
        for each in skipped:
            name = self._who_skipped(each, arrival)
            text = f"worker {name!r} gave up this collective, so not all workers can take part"
            self.fail(each, arrival.known, CallCancelled(text, worker=name))
        if collective is None:
            answer(*(({}, None) if is_late else (None, error)))
        elif is_due:
            if is_new and collective.parent is not None:
                self._send_up(key, collective, Stage.ENTER, None, partial(self._entered, key, collective))
            self._look(key)

    def _check_sender(self, arrival: Arrival) -> None:
        """Raise if the sender is not this worker or below it, or says what it cannot say."""
        known, stage = arrival.known, arrival.stage
        size, place, mine = len(known.view), known.places[arrival.name], known.places.get(self._local.name)
        is_inner = bool(static_children(place, size, self._fan_out))
        if place == mine:
            valid = stage is Stage.VALUE
        else:
            is_possible = stage is Stage.FAILED or is_inner == (stage is not Stage.VALUE)
            valid = place > 0 and static_parent(place, self._fan_out) == mine and is_possible
        if valid and stage is Stage.SUBTREE:
            names = {known.name(each) for each in subtree(place, size, self._fan_out)}
            valid = type(arrival.value) is dict and names.issuperset(arrival.value)
        if not valid:
            raise ProtocolError(f"worker {arrival.name!r} sent a message of a collective that it cannot send")

    def _skipped(self, arrival: Arrival) -> list[Round]:
        """Return the collectives that a member will not come to, because its calls failed or were cancelled."""
        digest = arrival.round.digest
        if arrival.stage is not Stage.VALUE:
            return []
        oldest = self._oldest.setdefault(digest, {})
        oldest[arrival.name] = max(arrival.oldest, oldest.get(arrival.name, 0))
        if len(self._oldest) > _MAX_REMEMBERED:
            del self._oldest[next(iter(self._oldest))]
        return [
            key
            for key, collective in self._pending.items()
            if key.digest == digest and key.number < arrival.oldest and arrival.name in collective.missing
        ]

    def _who_skipped(self, key: Round, arrival: Arrival) -> str:
        with self._lock:
            collective, oldest = self._pending.get(key), self._oldest.get(key.digest, {})
            skipped = collective.missing if collective is not None else ()
            return next((name for name in sorted(skipped) if oldest.get(name, 0) > key.number), arrival.name)

    def pending(self) -> list[PendingRound]:
        """Return the collectives that wait here."""
        with self._lock:
            return [
                PendingRound(
                    key,
                    each.began,
                    sorted(each.missing) or ([each.parent] if each.parent is not None else []),
                    [answer for _, _, answer in each.answers],
                )
                for key, each in self._pending.items()
            ]

    def waits_for(self, key: Round) -> WaitsFor:
        """Return the members that a collective waits for here, and whom to ask for others."""
        with self._lock:
            collective = self._pending.get(key)
            if collective is None:
                return WaitsFor([], [], None)
            places, size = collective.known.places, len(collective.known.view)
            inner = [
                name
                for name in collective.missing
                if name != self._local.name and static_children(places[name], size, self._fan_out)
            ]
            names = sorted(collective.missing.difference(inner))
            return WaitsFor(names, sorted(inner), collective.parent)

    def group_changed(self) -> None:
        """Look at all collectives again: a worker is gone, or was replaced, or has joined."""
        with self._lock:
            keys = list(self._pending)
        for key in keys:
            self._look(key)

    def _look(self, key: Round) -> None:
        """Pass the values on if all have arrived, or fail if one never will."""
        if self._local.closed:  # the others find this worker gone
            return
        with self._lock:
            collective = self._pending.get(key)
            if collective is None:
                return
            is_complete = not collective.missing
            error = self._obstacle(collective) if not is_complete or collective.passed_on else None
            passes_on = is_complete and collective.parent is not None and not collective.passed_on
            collective.passed_on = collective.passed_on or passes_on
        if error is not None:
            self.fail(key, collective.known, error)
        elif passes_on:
            ended = partial(self._passed_on, key, collective)
            self._send_up(key, collective, Stage.SUBTREE, collective.values, ended)
        elif is_complete and collective.parent is None:
            # Members do not need the values of a barrier, which are all None.
            values = collective.values
            self._end(key, {name: values.get(name) for name, _, _ in collective.known.view} if values else {})

    def _obstacle(self, collective: _Collective) -> Exception | None:
        changes = self._peers.changes
        if collective.known.checked == changes:
            return None
        peers, now = self._peers.all(), self._local.runtime.now()
        error, is_sure = _obstacle(collective, peers, now)
        if is_sure and error is None:
            collective.known.checked = changes
        return error

    # -- the member above ---------------------------------------------------------------------------------------

    def _send_up(self, key: Round, collective: _Collective, stage: Stage, value: object, done: Respond) -> None:
        assert collective.parent is not None
        arguments = (*key, value, collective.timeout, collective.whole, 1, int(stage))
        self._call_up(collective.parent, arguments, done)

    def _entered(self, key: Round, collective: _Collective, values: object, error: Exception | None) -> None:
        if error is not None:  # if it went well, the answer with the values comes by itself
            self._failed_above(key, collective, error)

    def _passed_on(self, key: Round, collective: _Collective, values: object, error: Exception | None) -> None:
        if error is None:
            self._end(key, values)
        else:
            self._failed_above(key, collective, error)

    def _failed_above(self, key: Round, collective: _Collective, error: Exception) -> None:
        if may_be_unheard_of(error):
            error = not_passed_on(self.name, error)
            self._tell_above(key, collective.known, error)
        self._fail_here(key, collective, error)

    # -- the end ------------------------------------------------------------------------------------------------

    def _check(self, key: Round) -> None:
        """Look again, and connect to members without a connection: one of them may have died unnoticed."""
        self._look(key)
        with self._lock:
            collective = self._pending.get(key)
            if collective is None:
                return
            again = self._local.runtime.now() + CHECK
            collective.check = self._local.executor.timers.at(again, partial(self._check, key))
        connect_to(self._local, self._peers, collective.children)

    def fail(self, key: Round, known: KnownView, error: Exception) -> None:
        """Fail a collective here, and tell the member above; if the values were passed on, that one decides."""
        with self._lock:
            collective = self._pending.get(key)
            ended = max(self._failed.get(key.digest, (0, None))[0], self._ended.get(key.digest, 0))
            if collective is None and key.number <= ended:
                return
            is_told = collective is not None and collective.is_told
            passed_on = collective is not None and collective.passed_on
            if collective is not None:
                collective.is_told = True
        if not is_told:
            self._tell_above(key, known, error)
        if not passed_on:
            self._fail_here(key, collective, error)

    def _tell_above(self, key: Round, known: KnownView, error: Exception) -> None:
        place = known.places[self._local.name]
        if place:
            above = known.name(static_parent(place, self._fan_out))
            self._call_up(above, failure(key, error), lambda value, error: None)

    def _fail_here(self, key: Round, collective: _Collective | None, error: Exception) -> None:
        with self._lock:
            if collective is not None and self._pending.get(key) is not collective:
                return
            collective = self._pending.pop(key, None)
            number, _ = self._failed.pop(key.digest, (0, None))
            self._failed[key.digest] = (max(number, key.number), error)
            if len(self._failed) > _MAX_REMEMBERED:
                del self._failed[next(iter(self._failed))]
        if collective is not None:
            self._answer(collective, None, error)

    def _end(self, key: Round, values: object) -> None:
        with self._lock:
            collective = self._pending.pop(key, None)
            self._ended[key.digest] = max(key.number, self._ended.pop(key.digest, 0))
            if len(self._ended) > _MAX_REMEMBERED:
                del self._ended[next(iter(self._ended))]
        if collective is not None:
            self._answer(collective, values, None)

    def _answer(self, collective: _Collective, values: object, error: Exception | None) -> None:
        for timer in (collective.timer, collective.check):
            if timer is not None:
                self._local.executor.timers.cancel(timer)
        answers, collective.answers, collective.values = collective.answers, [], {}  # a call up may go on for a minute
        # This worker last: once it has its reply it may leave, and by then the others must have theirs.
        for _, stage, answer in sorted(answers, key=lambda each: each[0] == self._local.name):
            answer({} if stage is Stage.ENTER and error is None else values, error)


def connect_to(local: LocalWorker, peers: Peers, names: list[str]) -> None:
    """Connect to those of the workers that there is no connection with, to learn whether they are alive."""

    def connect(peer: Peer) -> None:
        try:
            peers.connector.channel_to(peer, local.runtime.now() + _PROBE)
        except TelegradError as error:  # if it is lost, those that wait for it have been told
            _log.debug("cannot connect to worker %r, which takes part in a collective: %s", peer.record.name, error)

    for name in names:
        peer = peers.find(name)
        # A worker that opened a connection here and died is lost sooner if it refuses one.
        connected = peer.outgoing or peer.opening or (peer.incoming is not None and peer.incoming.link)
        if not peer.gone and not connected:
            local.executor.submit(partial(connect, peer), urgent=True)


def _values_of(arrival: Arrival) -> dict[str, Any]:
    if arrival.stage is Stage.SUBTREE:
        values: dict[str, Any] = arrival.value
        return values
    return {} if arrival.value is None else {arrival.name: arrival.value}


def _obstacle(collective: _Collective, peers: list[Peer], now: float) -> tuple[Exception | None, bool]:
    """Return why the members of a collective will not all come, if that is known here, and whether it will stay so."""
    known, unknown = {peer.record.name: peer for peer in peers}, []
    for name, generation, incarnation in collective.known.view:
        peer = known.get(name)
        if peer is None or peer.record.generation < generation:
            unknown.append(name)
        elif peer.record.generation > generation:
            text = f"worker {name!r} was replaced, so not all workers can take part. Call it again"
            return WorkerLost(text, worker=name), True
        elif peer.record.incarnation != incarnation:
            unknown.append(name)
        elif peer.gone:
            text = f"worker {name!r} is gone ({peer.gone}), so not all workers can take part"
            return WorkerLost(text, worker=name), True
    come = sorted({name for name, _, _ in collective.answers})
    if unknown:
        if now < collective.began + AGREE:
            return None, False
        return GroupsDiffer(
            f"{workers(come)} did a collective with {workers(unknown)}, whom the worker that collects the values has "
            f"not heard of within {AGREE:g} s"
        ), True
    joined = [peer.record.name for peer in peers if not peer.gone and peer.record.name not in collective.known.places]
    if collective.whole and joined:
        return GroupsDiffer(
            f"{workers(joined)} joined the group while {workers(come)} waited in a collective of all workers, which "
            f"did not include {'it' if len(joined) == 1 else 'them'}. Call it again"
        ), True
    return None, not joined
