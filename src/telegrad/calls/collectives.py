"""Collectives: the barrier, all_gather, and the rounds of a graceful shutdown.

Their members form a tree (`telegrad.protocol.collective_tree`), which is a star in small groups. A member with others
below it collects their values, and its own, as `telegrad.calls.collective_node` and `telegrad.calls.shutdown_rounds`
say. One without sends its value to the member above it. Both wait for the outcome. Whoever waits for long asks that
member for whom, and logs it: it knows for whom it waits, asks the ones below whose values have not come, and if all
have come, the one above.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from telegrad.calls.call import Call, current_served
from telegrad.calls.collective_errors import explained, late, missing_error, silent
from telegrad.calls.collective_kinds import name_value, tagged, untagged
from telegrad.calls.collective_messages import (
    DETACHED,
    SHUTDOWN,
    UNKNOWN_VIEW,
    USER,
    Arrival,
    PendingRound,
    Respond,
    Round,
    Stage,
    failure,
    fields_of,
    may_be_unheard_of,
    round_of,
    told,
)
from telegrad.calls.collective_node import CollectiveNode
from telegrad.calls.collective_view import KnownView, KnownViews, View, digest_of
from telegrad.calls.completion import Explainer
from telegrad.calls.extension import outside_of_contexts
from telegrad.calls.service_names import GATHER
from telegrad.calls.shutdown_report import ShutdownReport
from telegrad.calls.shutdown_rounds import MISSED, PAUSE, ShutdownRounds
from telegrad.connection.channel import Channel
from telegrad.connection.local_worker import LocalWorker
from telegrad.connection.peer_table import Peer
from telegrad.connection.peers import Peers
from telegrad.errors import DeadlineExceeded, ProtocolError, TelegradError, WorkerLost
from telegrad.events import COLLECTIVE
from telegrad.execution.reported_wait import ReportedWait
from telegrad.protocol.collective_tree import static_children, static_parent
from telegrad.waiting_report import WaitingReport, seconds, workers

if TYPE_CHECKING:
    from telegrad.calls.client import Client

_log = logging.getLogger("telegrad")

_ASK = 2.0  # seconds for another member to say whom it waits for
_SHARE = 0.75  # of the time that a question may take: how long it waits for the answer of the next member
_FRESH = 0.5  # seconds for which such an answer is given to others, too
_SLACK = 5.0  # seconds after the timeout of a collective within which it must have ended

CallWorker = Callable[..., Any]
Begin = Callable[..., Call]


class Collectives:
    """The collectives that this worker takes part in."""

    def __init__(self, local: LocalWorker, peers: Peers, call: CallWorker, begin: Begin, client: Client) -> None:
        """`begin` starts a call, with a function to call with it when it has ended."""
        self._local = local
        self._peers = peers
        self._call = call
        self._begin = begin
        self._client = client
        self.node = CollectiveNode(local, peers, self._call_up, self._expire)
        self.shutdown_rounds = ShutdownRounds(local, peers, self._call_up)
        self.shutdown_report = ShutdownReport(local, client)
        self.explainer: Explainer | None = None
        """Says what a collective waits for whose deadline has passed."""
        self._views = KnownViews(peers)
        self._lock = threading.Lock()  # protects the four below
        self._numbers: dict[bytes, tuple[int, KnownView]] = {}  # of the last collective of each view
        self._in_flight: dict[bytes, set[int]] = {}
        self._shutdown_rounds = 0
        self._missing: dict[tuple[Round, bool], tuple[float, list[str]]] = {}  # whom a collective waited for, and when

    # -- members ----------------------------------------------------------------------------------------------

    def gather(
        self, value: object, names: Sequence[str] | None = None, *, timeout: float | None, what: str = "all_gather()"
    ) -> dict[str, Any]:
        """Contribute `value`, and return the values of all `names` (default: all workers), which must all call this.

        `timeout` is in seconds; None and 0 mean no limit. `what` is the function that this worker has called, for logs,
        and to check that all have called the same one. Tensors arrive as leaves, in autograd contexts, too.
        """
        if names is None:
            digest, known = self._views.current()
        else:
            view = _view_of(self._local, self._peers, names)
            digest = digest_of(view)
            known = self._views.find(digest) or self._views.keep(digest, KnownView(view))
        with self._lock:
            if digest not in self._numbers:
                self._forget_old_views()
                self._views.keep(digest, known)
            number = self._numbers.get(digest, (0, known))[0] + 1
            self._numbers[digest] = number, known
            in_flight = self._in_flight.setdefault(digest, set())
            in_flight.add(number)
            oldest = min(in_flight)
        key, target = Round(USER, number, digest), _target(self._local, known)
        arguments = (*key, tagged(what, value), timeout, names is None, oldest, int(Stage.VALUE))
        deadline = timeout + _SLACK if timeout else 0.0
        began, outcome = self._local.runtime.now(), ""
        describe = partial(_wait_text, target, what)
        waiting = self._local.waits.enter("barrier", (target,), describe, current_served.get(), key)
        try:
            with self._reported(target, key, what), outside_of_contexts():
                values = self._call(target, GATHER, arguments, timeout=deadline)
                if values is UNKNOWN_VIEW:
                    values = self._call(target, GATHER, (*arguments, known.view), timeout=deadline)
        except BaseException as error:
            outcome = type(error).__name__
            name_value(error)
            if may_be_unheard_of(error):
                _give_up(self._call, self.node, key, known, target, told(self._local.name, what, error))
            raise
        finally:
            self._local.waits.leave(waiting)
            now = self._local.runtime.now()
            self._local.events.record(COLLECTIVE, began, now, number, peer=target, what=what, outcome=outcome)
            with self._lock:
                in_flight.discard(number)
                if not in_flight:
                    del self._in_flight[digest]
        return untagged(what, values, known.places, target)

    def _forget_old_views(self) -> None:
        """Forget the numbers in views of which a member was replaced or has left: they do not return."""
        alive = {
            (peer.record.name, peer.record.generation, peer.record.incarnation)
            for peer in self._peers.all()
            if not peer.left
        }
        for digest, (_, known) in list(self._numbers.items()):
            if digest not in self._in_flight and not alive.issuperset(known.view):
                del self._numbers[digest]

    def shutdown_round(self, value: object, timeout: float | None, schedule: WaitingReport) -> object:
        """Contribute `value` to the next round of the shutdown, and return the summary of those of all workers.

        It does not wait for workers that are gone. The result is an empty dict if the round was not completed, and the
        other workers are in a later one, or will be. `schedule` is that of the reports of the whole shutdown.
        """
        runtime = self._local.runtime
        deadline = runtime.now() + timeout if timeout else None
        with self._lock:
            self._shutdown_rounds += 1
            key = Round(SHUTDOWN, self._shutdown_rounds, b"")
        while True:
            target = self.shutdown_rounds.tree.target()
            left = 0.0 if deadline is None else max(0.01, deadline - runtime.now())
            arguments = (*key, value, None, True, key.number, int(Stage.VALUE), self.shutdown_rounds.tree.above(target))
            asked = runtime.now()
            try:
                with self._reported(target.record.name, key, "shutdown()", schedule):
                    try:
                        result = self.shutdown_report.send(target.record.name, arguments, left)
                    except DeadlineExceeded as error:  # of this worker: the others wait on
                        raise late(error, key, target.record.name, self._awaited, timeout) from None
            except WorkerLost:
                # Go on only if the worker itself was lost: the next one takes over, or its replacement.
                if not target.gone:
                    raise
                continue
            if result is not None and result != DETACHED:
                return result
            self.shutdown_rounds.tree.sent_away(target, asked, result)
            if deadline is not None and runtime.now() >= deadline:
                return MISSED
            runtime.event().wait(runtime.now() + PAUSE)  # until both know the same group

    # -- the member above ---------------------------------------------------------------------------------------

    def _call_up(self, to: str, arguments: tuple[Any, ...], done: Respond) -> None:
        """Call another member, on a worker thread: the caller may hold up others, and may be served with a deadline."""

        def ended(call: Call) -> None:
            try:
                value = self._client.result(call)
            except Exception as error:  # noqa: BLE001 - also what is not telegrad's: others wait for `done`
                done(None, _without_frames(error))
                return
            if value is UNKNOWN_VIEW:
                known = self._views.find(arguments[2])
                if known is not None:
                    self._call_up(to, (*arguments, known.view), done)
                    return
            done(value, None)

        def send() -> None:
            try:
                self._begin(to, GATHER, arguments, timeout=0.0, on_done=ended)
            except Exception as error:  # noqa: BLE001 - as above
                done(None, _without_frames(error))

        self._local.executor.submit(send, urgent=True)

    # -- reports ----------------------------------------------------------------------------------------------

    def _reported(self, target: str, key: Round, what: str, schedule: WaitingReport | None = None) -> ReportedWait:
        local = self._local

        def report(elapsed: float) -> None:
            local.executor.submit(partial(self._report, wait, target, key, what, elapsed))

        wait = ReportedWait(local.runtime, local.executor, report, schedule)
        return wait

    def _report(self, wait: ReportedWait, target: str, key: Round, what: str, elapsed: float) -> None:
        """Log whom a collective waits for, on a worker thread."""
        try:
            missing = self._awaited(target, key)
        except TelegradError as error:
            waits_for = f"worker {silent(error, target)!r}, which collects the values and does not answer"
            _log.debug("worker %r cannot ask %r whom a collective waits for: %s", self._local.name, target, error)
        else:
            if not missing:  # it has just ended
                return
            waits_for = workers(missing)
            if key.topic == SHUTDOWN:
                one = len(missing) == 1
                waits_for += (
                    f", which {'has' if one else 'have'} not called it, or still {'runs' if one else 'run'} calls"
                )
        if not wait.over:
            _log.warning("worker %r has waited %s in %s for %s", self._local.name, seconds(elapsed), what, waits_for)

    def pending(self) -> list[PendingRound]:
        """Return the collectives that wait here: for members below this worker, or for the one above it."""
        return [*self.node.pending(), *self.shutdown_rounds.pending()]

    def _whom(self, key: Round, *, up: bool) -> list[str]:
        """Return whom a collective waits for at or below this member, or if `up` and all have come, elsewhere."""
        now = self._local.runtime.now()
        asked, missing = self._missing.get((key, up), (-_FRESH, []))
        if now < asked + _FRESH:
            return missing
        node = self.shutdown_rounds if key.topic == SHUTDOWN else self.node
        names, inner, parent = node.waits_for(key)
        missing = list(names)
        for name in inner:
            try:
                missing += self._ask(name, key, up=False) or [name]
            except TelegradError:  # it is missing in any case
                missing.append(name)
        if not missing and up and parent is not None:
            missing = self._ask(parent, key)
        with self._lock:
            self._missing = {(key, up): (now, missing)}
        return missing

    def _awaited(self, target: str, key: Round) -> list[str]:
        return self._whom(key, up=True) if target == self._local.name else self._ask(target, key)

    def _ask(self, member: str, key: Round, *, up: bool = True) -> list[str]:
        missing = self._call(member, GATHER, (*key, up), timeout=_time_to_ask(self._local.runtime.now()))
        known = {peer.record.name for peer in self._peers.all()}
        if not isinstance(missing, list) or not known.issuperset(map(str, missing)):
            raise ProtocolError(f"worker {member!r} does not say which workers a collective waits for")
        return missing

    def _expire(self, key: Round, what: str, timeout: float, fail: Callable[[Exception], None]) -> None:
        """Fail a collective that has lasted too long. Called by a timer."""

        def name_the_missing() -> None:
            missing = self._whom(key, up=False)
            if missing:
                fail(explained(self.explainer, missing_error(key, missing, timeout, what), timeout, what))

        self._local.executor.submit(name_the_missing)

    # -- serving ------------------------------------------------------------------------------------------------

    def arrive(self, answer: Respond, topic: object, number: object, digest: object, *rest: Any) -> None:
        """Serve a member: take what it says, or tell it whom its collective waits for, or the parent of this worker."""
        served = current_served.get()
        caller = self._local.name if served is None else served.caller
        incarnation = self._local.me.incarnation if served is None else served.worker.incarnation
        key, malformed = round_of(topic, number, digest), f"worker {caller!r} sent a malformed message of a collective"
        if key is not None and len(rest) == 1 and (rest[0] is None or type(rest[0]) is bool):
            asked = self.shutdown_rounds.tree.reports_to() if rest[0] is None else self._whom(key, up=rest[0])
            answer(asked, None)
            return
        fields = None if key is None else fields_of(key, rest)
        if key is None or fields is None:
            raise ProtocolError(malformed)
        value, timeout, whole, oldest, stage, view, above = fields
        if topic == SHUTDOWN:
            self.shutdown_rounds.arrive(answer, caller, incarnation, key.number, stage, value, above)
            return
        known = self._views.find(key.digest) if view is None else self._views.add(key.digest, view)
        if known is None and view is None:
            answer(UNKNOWN_VIEW, None)
            return
        if known is None or known.incarnations.get(caller) != incarnation:
            raise ProtocolError(malformed)
        self.node.arrive(answer, Arrival(key, known, caller, value, timeout, whole, oldest, stage))

    def peer_lost(self, peer: Peer, channels: list[Channel], reason: str) -> None:
        """Fail the collectives that wait for a worker which is gone."""
        self.node.group_changed()
        self.shutdown_rounds.look()


def _target(local: LocalWorker, known: KnownView) -> str:
    """Return the member that a worker sends its value to: itself if others are below it, else the one above."""
    place, fan_out = known.places[local.name], local.settings.fan_out
    is_leaf = place > 0 and not static_children(place, len(known.view), fan_out)
    return known.name(static_parent(place, fan_out) if is_leaf else place)


def _give_up(
    call: CallWorker, node: CollectiveNode, key: Round, known: KnownView, target: str, error: TelegradError
) -> None:
    """Fail a collective that this worker cannot take part in, for the others, too."""
    if target == node.name:
        node.fail(key, known, error)
        return
    try:  # and wait until it has arrived: the next collective would fail this one with another error
        if call(target, GATHER, failure(key, error), timeout=_ASK) is UNKNOWN_VIEW:
            call(target, GATHER, (*failure(key, error), known.view), timeout=_ASK)
    except TelegradError as unheard:
        _log.debug("worker %r cannot be told that a collective has failed: %s", target, unheard)


def _view_of(local: LocalWorker, peers: Peers, names: Sequence[str]) -> View:
    mine, wanted = local.name, set(names)
    members = [record for record in peers.records() if record.name in wanted]
    for name in wanted - {record.name for record in members}:
        peers.find(name)  # raises the error that lists the known ones
    if mine not in wanted:
        raise ValueError(f"worker {mine!r} is not among {sorted(names)}, so it cannot take part")
    return tuple((record.name, record.generation, record.incarnation) for record in members)


def _time_to_ask(now: float) -> float:
    """Return how long a question may take: less than the one has that asks this worker, which shall hear the answer."""
    served = current_served.get()
    if served is None or served.deadline is None:
        return _ASK
    return min(_ASK, max(0.01, _SHARE * (served.deadline - now)))


def _wait_text(target: str, what: str) -> str:
    return f"the others in {what}, whose values worker {target!r} collects"


def _without_frames(error: Exception) -> Exception:
    """Return an error that refers to no calls: it is remembered, and given to all members that come later."""
    error.__cause__ = error.__context__ = None
    return error.with_traceback(None)
