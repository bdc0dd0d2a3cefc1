"""The rounds of a graceful shutdown at one worker: collects reports from below, passes them on, and answers.

Rounds have the same numbers on all workers, and go on without workers that are gone: the tree changes with them
(`telegrad.protocol.collective_tree`). The rules:

1. When somebody at or below a worker comes to a round, the worker *enters* the round at its parent. When all below it
   have reported, it sends the sum there. The root then knows what all say, and the answers carry it back down.
2. Whoever is not a child, as this worker knows the group, is sent away with None, and asks again after a moment: it, or
   this worker, has not heard of a loss or of a replacement yet. If the parent is lost, the sum is sent to the next.
3. Two workers that have lost each other, while others have not, know different trees for ever. Then the rules of
   `telegrad.protocol.shutdown_parents` say who reports to whom: DETACHED sends a child away for good, INSISTS makes a
   parent take it, and a worker asks the children that it misses for their parent.
4. A worker remembers the result of the last round, for children whose parent is lost before it has answered them.
5. Whoever comes to a round when another has come to a later one gets an empty dict: the round is over, and nobody will
   complete it. The workers that wait in it get the same, and go on to the next round, too.
6. If a launcher starts dead workers again, the others wait for those for some time.
7. A worker that is closing answers nobody: the others find it gone.
"""

from __future__ import annotations

import threading
from functools import partial
from typing import Any, NamedTuple

from telegrad.calls.collective_messages import (
    DETACHED,
    INSISTS,
    ROOT,
    SHUTDOWN,
    CallUp,
    PendingRound,
    Respond,
    Round,
    Stage,
    WaitsFor,
)
from telegrad.calls.collective_node import CHECK, connect_to
from telegrad.calls.shutdown_tree import ShutdownTree
from telegrad.connection.local_worker import LocalWorker
from telegrad.connection.peers import Peers
from telegrad.errors import ProtocolError, WorkerLost
from telegrad.execution.timers import Timer
from telegrad.protocol.shutdown_parents import DETACH
from telegrad.protocol.shutdown_report import Report, from_plain, to_plain, total

PAUSE = 0.1
"""Seconds after which a worker that was sent away asks again."""
MISSED: dict[str, Any] = {}
"""The answer to a round that is over, and was not completed."""
_LONGEST = 60.0  # maximum seconds between two questions to a child that is missing


class _Answer(NamedTuple):
    name: str
    """The child that is answered, or this worker."""
    incarnation: int
    answer: Respond
    above: int | None
    """What the child holds for the id of this worker's parent."""
    came: float


class _Round:
    def __init__(self, key: Round, now: float) -> None:
        self.key = key
        self.began = now
        self.reports: dict[str, tuple[int, Report]] = {}
        """What each has said, and which incarnation of it."""
        self.answers: list[_Answer] = []
        self.entered_at = ""
        """The name of the parent that knows of the round."""
        self.passed_to = ""
        """The name of the parent that has the sum."""
        self.asked_above = now
        self.asks_at = now + DETACH
        """When to ask the children that are missing whom they report to."""
        self.pause = DETACH
        """Seconds until the next time."""
        self.asked: set[str] = set()
        """Those that have not answered yet."""
        self.check: Timer | None = None


class ShutdownRounds:
    """The rounds that this worker takes part in."""

    def __init__(self, local: LocalWorker, peers: Peers, call_up: CallUp) -> None:
        self._local = local
        self._peers = peers
        self._call_up = call_up
        self.tree = ShutdownTree(local, peers)
        self._lock = threading.Lock()  # protects the three below
        self.latest = 0
        """The number of the latest round that a worker has come to here."""
        self._round: _Round | None = None
        self._result: object = MISSED  # of round `latest`, if it has ended here

    # -- reports ------------------------------------------------------------------------------------------------

    def arrive(
        self,
        answer: Respond,
        name: str,
        incarnation: int,
        number: int,
        stage: Stage,
        value: object,
        above: int | None = None,
    ) -> None:
        """Take what a worker says, and answer when the round has ended."""
        report = None if stage is Stage.ENTER else self._report_of(name, value)
        if not self.tree.is_there(name, incarnation):  # or it would speak for its replacement
            answer(None, None)
            return
        missed = current = None
        result: object = MISSED
        with self._lock:
            if number > self.latest:
                missed, self.latest, self._result = self._round, number, MISSED
                current = self._round = self._begin(number)
            elif number == self.latest and self._round is not None:
                current = self._round
            elif number == self.latest:
                result = self._result
            if current is not None:
                insists = above == INSISTS and name != self._local.name
                self.tree.came(name, insists=insists)
                above = None if insists or name == self._local.name else above
                current.answers.append(_Answer(name, incarnation, answer, above, self._local.runtime.now()))
                if report is not None:
                    current.reports[name] = incarnation, report
        if missed is not None:
            self._answer(missed, MISSED, None)
        if current is None:
            answer(result, None)
        else:
            self.look()

    def _begin(self, number: int) -> _Round:
        now = self._local.runtime.now()
        current = _Round(Round(SHUTDOWN, number, b""), now)
        current.check = self._local.executor.timers.at(now + CHECK, partial(self._check, current))
        return current

    def _report_of(self, name: str, value: object) -> Report:
        try:
            return from_plain(value, len(self._peers.table))
        except (TypeError, ValueError) as error:
            raise ProtocolError(f"worker {name!r} sent a malformed message about its shutdown: {error}") from error

    def look(self) -> None:
        """Pass the reports on, or answer, if all have come. Send those away that are not children any more."""
        if self._local.closed:
            return
        tree, peers, place = self.tree.now()
        above = tree.parent(place)
        parent, parent_id = ("", ROOT) if above is None else (peers.at(above).record.name, peers.at(above).record.id)
        latest = self._local.runtime.now() - DETACH
        with self._lock:
            current = self._round
            if current is None:
                return
            awaited = self.tree.awaited(tree, peers, place)
            away: list[tuple[_Answer, str | None]] = [
                (each, None)
                for each in current.answers
                if each.name not in awaited or not self.tree.is_there(each.name, each.incarnation)
            ]
            if not parent or parent != current.passed_to:  # else their reports are on their way
                detached = [
                    each
                    for each in current.answers
                    if each.name in awaited and each.above not in (None, ROOT, parent_id) and each.came <= latest
                ]
                away += [(each, DETACHED) for each in detached]
                for each in detached:
                    current.reports.pop(each.name, None)
            gone = {id(each) for each, _ in away}
            current.answers = [each for each in current.answers if id(each) not in gone]
            current.reports = {
                name: said
                for name, said in current.reports.items()
                if name in awaited and self.tree.is_there(name, said[0])
            }
            is_complete = len(current.reports) == len(awaited)
            enters = bool(parent) and parent not in (current.entered_at, current.passed_to)
            passes_on = bool(parent) and is_complete and parent != current.passed_to
            current.entered_at = parent if enters else current.entered_at
            current.passed_to = parent if passes_on else current.passed_to
            report = total(report for _, report in current.reports.values()) if is_complete else None
        for each, result in away:
            each.answer(result, None)
        if enters and not passes_on:
            self._send_up(current, parent, Stage.ENTER, None)
        if passes_on and report is not None:
            self._send_up(current, parent, Stage.SUBTREE, to_plain(report))
        if not parent and report is not None:
            self._end(current, (report.busy, report.made, report.settled))

    # -- the parent ---------------------------------------------------------------------------------------------

    def _send_up(self, current: _Round, parent: str, stage: Stage, value: object) -> None:
        above = self.tree.above(self._peers.find(parent))
        arguments = (*current.key, value, None, True, current.key.number, int(stage), above)
        current.asked_above = self._local.runtime.now()
        self._call_up(parent, arguments, partial(self._answered, current, parent))

    def _answered(self, current: _Round, parent: str, value: object, error: Exception | None) -> None:
        if self._local.closed:
            return
        if isinstance(error, WorkerLost) and error.worker == parent:
            self._ask_again(current, parent)
        elif error is not None:
            self._fail(current, error)
        elif value is None or value == DETACHED:
            self.tree.sent_away(self._peers.find(parent), current.asked_above, value)
            again = self._local.runtime.now() + PAUSE
            self._local.executor.timers.at(again, partial(self._ask_again, current, parent))
        else:
            self._end(current, value)

    def _ask_again(self, current: _Round, parent: str) -> None:
        with self._lock:
            current.entered_at = "" if current.entered_at == parent else current.entered_at
            current.passed_to = "" if current.passed_to == parent else current.passed_to
        self.look()

    # -- children that are missing ------------------------------------------------------------------------------

    def _ask_children(self, current: _Round, names: list[str]) -> None:
        """Ask those of the children that are missing whom they report to, from time to time."""
        now = self._local.runtime.now()
        with self._lock:
            if now < current.asks_at:
                return
            missing = [name for name in names if name not in current.reports and name != self._local.name]
            missing = [name for name in missing if not self._peers.find(name).gone]
            self.tree.asks(missing)
            missing = [name for name in missing if name not in current.asked]
            current.asked |= set(missing)
            current.pause = DETACH if self.tree.doubtful else min(2 * current.pause, _LONGEST)
            current.asks_at = now + current.pause
        for name in missing:
            incarnation = self._peers.find(name).record.incarnation
            self._call_up(name, (*current.key, None), partial(self._told, current, name, incarnation))

    def _told(self, current: _Round, name: str, incarnation: int, parent: object, error: Exception | None) -> None:
        # A worker that cannot be asked may be lost, which is noticed anyway.
        given_up = error is None and self.tree.said(incarnation, parent)
        with self._lock:
            current.asked.discard(name)
            if self.tree.doubtful:
                current.asks_at = min(current.asks_at, self._local.runtime.now() + DETACH)
        if given_up:
            self.look()

    # -- the end ------------------------------------------------------------------------------------------------

    def _check(self, current: _Round) -> None:
        """Look again, and connect to children without a connection: one of them may have died unnoticed."""
        self.look()
        tree, peers, place = self.tree.now()
        with self._lock:
            if self._round is not current:
                return
            awaited = self.tree.awaited(tree, peers, place)
            again = self._local.runtime.now() + CHECK
            current.check = self._local.executor.timers.at(again, partial(self._check, current))
        self._ask_children(current, awaited)
        connect_to(self._local, self._peers, [peers.at(child).record.name for child in tree.children(place)])

    def pending(self) -> list[PendingRound]:
        """Return the round that waits here, if there is one."""
        tree, peers, place = self.tree.now()
        awaited = self.tree.awaited(tree, peers, place)
        with self._lock:
            current = self._round
            if current is None:
                return []
            above = current.passed_to or current.entered_at
            missing = sorted(set(awaited) - current.reports.keys()) or ([above] if above else [])
            return [PendingRound(current.key, current.began, missing, [each.answer for each in current.answers])]

    def waits_for(self, key: Round) -> WaitsFor:
        """Return the workers that a round waits for here, and whom to ask for others."""
        tree, peers, place = self.tree.now()
        with self._lock:
            current = self._round
            if current is None or current.key != key:
                return WaitsFor([], [], None)
            missing = set(self.tree.awaited(tree, peers, place)).difference(current.reports)
        size = len(peers)
        inner = [
            peers.at(child).record.name
            for child in tree.children(place)
            if peers.at(child).record.name in missing and self.tree.is_inner(child, size)
        ]
        above = tree.parent(place)
        parent = None if above is None else peers.at(above).record.name
        return WaitsFor(sorted(missing.difference(inner)), sorted(inner), parent)

    def _fail(self, current: _Round, error: Exception) -> None:
        self._end(current, MISSED, error)

    def _end(self, current: _Round, result: object, error: Exception | None = None) -> None:
        with self._lock:
            if self._round is not current:
                return
            self._round, self._result = None, result
        self._answer(current, result, error)

    def _answer(self, current: _Round, result: object, error: Exception | None) -> None:
        if current.check is not None:
            self._local.executor.timers.cancel(current.check)
        # This worker last: once it has its reply it may leave, and by then the others must have theirs.
        for each in sorted(current.answers, key=lambda each: each.name == self._local.name):
            each.answer(result, error)
