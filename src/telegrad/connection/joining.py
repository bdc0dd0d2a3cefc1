"""How a worker joins a group that exists: it gets a generation, and introduces itself to all members.

`telegrad.protocol.membership` has the rules. A newcomer without an authority asks all members for their votes until it
has a quorum. It asks those again that hold its predecessor for alive: it may take them some time to notice its death.
A member that does not answer may have been replaced meanwhile: those that do answer are asked who it is now.
Then it connects to every member. Each of them answers with all members that it knows and with its votes, and the
newcomer connects to those that are new to it, too. Of two newcomers that come at the same time, one comes second at any
member, and learns about the other there.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import msgspec

from telegrad.connection.handshake import Refused, StaleGeneration
from telegrad.connection.local_worker import LocalWorker
from telegrad.connection.peer_table import Peer
from telegrad.connection.peers import Peers
from telegrad.connection.questions import probe
from telegrad.connection.worker_record import WorkerRecord, check_generation, check_record
from telegrad.errors import (
    AuthenticationError,
    CallCancelled,
    NotAMember,
    NotInitialized,
    ProtocolError,
    ResourceExhausted,
    TelegradError,
    WorkerLost,
)
from telegrad.execution.executor import GuaranteedTask
from telegrad.protocol.membership import MAX_STEP, State, Vote
from telegrad.waiting import Event
from telegrad.waiting_report import WaitingReport
from telegrad.wire.handshake_messages import Purpose

_log = logging.getLogger("telegrad")

SERVICE = "@telegrad.members"
_PAUSE = 0.2  # seconds between two rounds of votes
_MAX_PAUSE = 1.0
_ATTEMPT = 3.0  # seconds that one member may take to answer a request for its vote
_DESERTED = 3  # rounds of votes in a row in which no member was there, after which the group is over

CallWorker = Callable[..., Any]
_OWN_ERRORS = (AuthenticationError, CallCancelled, NotInitialized, ResourceExhausted)


class GroupEnded(NotAMember):
    """All members of the group that this worker wanted to join have left it, or died, meanwhile."""


class GroupDescription(NamedTuple):
    """What a member tells newcomers."""

    members: list[tuple[WorkerRecord, State]]
    """All members, and what it holds them for."""
    votes: list[tuple[str, int, int, float]]
    """Its votes: name, generation, incarnation, seconds ago."""


class Joining:
    """Joins a group with the members that were found."""

    def __init__(self, local: LocalWorker, peers: Peers, call: CallWorker) -> None:
        self._local = local
        self._peers = peers
        self._call = call
        self._heard_votes_of: set[str] = set()
        self._lock = threading.Lock()  # protects the one below
        self._is_catching_up = False
        peers.on_abstention = self.catch_up

    # -- on members -------------------------------------------------------------------------------------------

    def describe(self) -> tuple[list[Any], list[Any]]:
        """Return a GroupDescription as plain data. Served to newcomers."""
        members, now = self._peers.members, self._local.runtime.now()
        return (
            [[msgspec.to_builtins(peer.record), int(members.state_of(peer.record))] for peer in self._peers.all()],
            # How long ago, not when: the clocks of two machines have nothing in common.
            [[name, vote.generation, vote.incarnation, now - vote.at] for name, vote in members.votes().items()],
        )

    # -- on the newcomer --------------------------------------------------------------------------------------

    def get_votes(self, records: Sequence[WorkerRecord], deadline: float) -> tuple[int, list[WorkerRecord]]:
        """Return a generation for which a quorum of the members has voted, and the other members as they are now.

        Raises NotAMember if there is no quorum in time, and GroupEnded if no member is there any more.
        """
        local, members, me = self._local, self._peers.members, self._local.me
        others = [record for record in records if record.name != me.name]
        first = max((record.generation for record in records if record.name == me.name), default=-1) + 1
        generation = first
        report, pause, alerted, deserted = WaitingReport(local.runtime.now()), _PAUSE, False, 0
        heeded: set[str] = set()  # members for whose knowledge another generation was sought, each of them once
        while True:
            candidate = msgspec.structs.replace(me, generation=generation)
            until = min(deadline, local.runtime.now() + _ATTEMPT)
            answers = self._ask_all(candidate, others, until)
            reasons = {name: answer.reason for name, answer in answers.items()}
            voters = [name for name, reason in reasons.items() if not reason]
            # A member that does not tell the truth must not use up the generations; see `membership.MAX_STEP`.
            known = {name: answer.known for name, answer in answers.items() if answer.known < first + MAX_STEP}
            # One of these would refuse the newcomer for ever: a launcher gave its predecessor a generation by itself,
            # and the voters have never heard of it.
            later = {name for name, one in known.items() if one >= generation} - heeded
            if members.is_quorum(me.name, voters) and not later:
                return generation, others
            heeded |= later
            deserted = deserted + 1 if all(answer.gone for answer in answers.values()) else 0
            if deserted == _DESERTED:
                raise GroupEnded(
                    f"worker {me.name!r} cannot join the group: all {len(others)} other members have left it or died"
                )
            generation = max([generation, *(one + 1 for one in known.values())])
            now = local.runtime.now()
            if now + pause + _PAUSE >= deadline:  # there would be no time to answer
                raise NotAMember(
                    f"worker {me.name!r} cannot take its place in the group: {_summary(len(records), voters, reasons)}"
                )
            if report.is_due(now):
                _log.warning(
                    "worker %r waits to take its place in the group: %s",
                    me.name,
                    _summary(len(records), voters, reasons),
                )
            if len(answers) < len(others) and not alerted:
                # The first one does not agree, and so the others were not asked. Let them look for the predecessor,
                # too: if it was cut off, each of them needs as long as the first one to notice.
                alerted = True
                self._in_parallel([partial(self._alert, record, until) for record in others])
            local.executor.wait(local.runtime.event(), now + pause)
            pause = min(2 * pause, _MAX_PAUSE)
            others = self._refreshed(others, answers, min(deadline, now + pause + _ATTEMPT))

    def _alert(self, target: WorkerRecord, deadline: float) -> None:
        """Let a member know that this worker wants to take its place, so that it looks for the one before."""
        probe(self._peers, self._local.me, target, deadline)

    def _refreshed(
        self, others: Sequence[WorkerRecord], answers: dict[str, _Answer], deadline: float
    ) -> list[WorkerRecord]:
        """Return the members with the replacements of those that do not answer, as another one knows them."""
        silent = {record.name for record in others if record.name in answers and not answers[record.name].answered}
        known = next((one for one in others if one.name in answers and answers[one.name].answered), None)
        if known is None:
            return list(others)
        me, dialer = self._local.me, self._peers.connector.dialer
        refreshed = []
        for record in others:
            if record.name in silent:
                try:
                    address = dialer.route_to(known)[1]
                    found = dialer.describe(me, address, record.id, deadline, known)
                except (OSError, TelegradError) as error:
                    _log.debug("worker %r cannot ask who worker %r is now: %s", me.name, record.name, error)
                else:
                    if found is not None and self._is_later(found.record, record):
                        record = found.record
            refreshed.append(record)
        return refreshed

    def _is_later(self, found: WorkerRecord, record: WorkerRecord) -> bool:
        """Return whether a member has been replaced by `found`, and the membership will accept that."""
        member = self._peers.members.find(record.name)
        if member is None or (found.name, found.id) != (record.name, member.identity.id):
            return False
        return record.generation < found.generation <= member.identity.generation + MAX_STEP

    def _ask_all(self, candidate: WorkerRecord, others: Sequence[WorkerRecord], until: float) -> dict[str, _Answer]:
        """Ask for votes, and return the answers by name.

        The first member that can vote is asked alone, and the others only if it agrees. All newcomers begin with the
        same one, so that of two that want to be the same worker, not each gets half of the votes.
        """
        answers: dict[str, _Answer] = {}
        left = list(others)
        while left:
            first = left.pop(0)
            answer = answers[first.name] = self._ask(candidate, first, until)
            if answer.reason and answer.decides:
                return answers
            if not answer.reason:
                break
        rest: list[_Answer] = self._in_parallel([partial(self._ask, candidate, record, until) for record in left])
        return {**answers, **{record.name: answer for record, answer in zip(left, rest, strict=True)}}

    def _ask(self, candidate: WorkerRecord, target: WorkerRecord, deadline: float) -> _Answer:
        """Ask a member for its vote."""
        try:
            self._peers.connector.dialer.ask(candidate, target, Purpose.VOTE, deadline)
        except StaleGeneration as stale:
            return _Answer(str(stale), known=stale.known)
        except Refused as refused:
            return _Answer(refused.reason, decides=refused.code == "vote", gone=refused.code == "leaving")
        except (OSError, TelegradError) as error:
            gone = not isinstance(error, TimeoutError)
            return _Answer(f"it does not answer ({error})", decides=False, answered=False, gone=gone)
        return _Answer()

    def introduce(self, deadline: float) -> None:
        """Connect to all members, learn what they know, and connect to those that are new here.

        A member that answers nothing until the deadline, or nothing of use, does not keep this worker from its place.
        """
        introduced: dict[str, int] = {self._local.name: self._local.me.incarnation}
        while True:
            due = [
                peer
                for peer in self._peers.all()
                if not peer.gone and introduced.get(peer.record.name) != peer.record.incarnation
            ]
            if not due:
                break
            introduced.update((peer.record.name, peer.record.incarnation) for peer in due)
            self._hear_from(due, deadline)
        self._decide_to_vote()

    def catch_up(self) -> None:
        """Ask the members again how they have voted, if this worker does not know it of a quorum and so cannot vote."""
        with self._lock:
            if self._is_catching_up or self._peers.members.may_vote:
                return
            self._is_catching_up = True
        try:
            others = [peer for peer in self._peers.all() if not peer.gone and peer.record.name != self._local.name]
            self._hear_from(others, self._local.runtime.now() + _ATTEMPT)
            self._decide_to_vote()
        except TelegradError as error:
            _log.debug("worker %r cannot ask how others have voted: %s", self._local.name, error)
        finally:
            with self._lock:
                self._is_catching_up = False

    def _hear_from(self, peers: Sequence[Peer], deadline: float) -> None:
        """Learn what these members know of the group.

        One that answers nothing for a while is lost, if all others that answer hold it for lost.
        """
        runtime = self._local.runtime
        held_for: dict[int, set[State]] = {}  # by incarnation: what others hold a member for
        runs = self._start([partial(self._introduce_to, peer.record.name, deadline) for peer in peers])
        heard: set[int] = set()
        while True:
            until = runtime.now() + _ATTEMPT
            finished = [self._local.executor.wait(run.done, until) for run in runs]
            for number, (peer, run) in enumerate(zip(peers, runs, strict=True)):
                if finished[number] and number not in heard:
                    heard.add(number)
                    self._take(peer.record, run.outcome(), held_for)
            if all(finished):
                return
            for peer, is_finished in zip(peers, finished, strict=True):
                if not is_finished and held_for.get(peer.record.incarnation) == {State.LOST}:
                    reason = "it does not answer, and the members that do have lost it"
                    self._peers.lost_workers.peer_lost(peer, reason)  # which ends the wait for it

    def _take(self, source: WorkerRecord, told: GroupDescription | None, held_for: dict[int, set[State]]) -> None:
        """Take over what a member has told."""
        if told is None:
            return
        self._heard_votes_of.add(source.name)
        for record, state in told.members:
            held_for.setdefault(record.incarnation, set()).add(state)
            if record.name == self._local.name:
                continue
            self._peers.learn(record)
            if state is State.LEFT and self._peers.members.find(record.name) is not None:
                self._peers.lost_workers.left(record)
        now = self._local.runtime.now()
        self._peers.members.merge_votes(
            [
                (name, Vote(generation, incarnation, now - max(0.0, age)))
                for name, generation, incarnation, age in told.votes
            ]
        )

    def _decide_to_vote(self) -> None:
        members = self._peers.members
        members.set_voting(members.is_quorum(self._local.name, self._heard_votes_of))

    def _introduce_to(self, name: str, deadline: float) -> GroupDescription | None:
        left = max(_PAUSE, deadline - self._local.runtime.now())
        try:
            return parse_description(self._call(name, SERVICE, (), timeout=left))
        except WorkerLost as error:
            _log.info("worker %r could not introduce itself to worker %r: %s", self._local.name, name, error)
        except _OWN_ERRORS:
            raise
        except Exception as error:  # noqa: BLE001 - exceptions of others keep their type, so it can be any
            _log.warning(
                "worker %r joins the group without knowing what worker %r knows of it: %s",
                *(self._local.name, name, error),
            )
        return None

    def _in_parallel(self, tasks: Iterable[Callable[[], Any]]) -> list[Any]:
        """Run the tasks on threads of the executor, and return their results."""
        runs = self._start(tasks)
        for run in runs:
            self._local.executor.wait(run.done, None)
        return [run.outcome() for run in runs]

    def _start(self, tasks: Iterable[Callable[[], Any]]) -> list[_Run]:
        """Run the tasks on threads of the executor."""
        runs = [_Run(self._local.runtime.event(), task) for task in tasks]
        self._local.executor.submit_all([GuaranteedTask(run) for run in runs])
        return runs


def parse_description(data: Any) -> GroupDescription:
    """Return what a member has told this newcomer. Raises ProtocolError if that cannot be."""
    try:
        told = msgspec.convert(data, GroupDescription)
        for record, _ in told.members:
            check_record(record)
        for _, generation, _, _ in told.votes:
            check_generation(generation)
    except ValueError as error:  # including msgspec's
        raise ProtocolError(f"it describes the group in an invalid way: {error}") from error
    return told


class _Answer(NamedTuple):
    """What a member says to a request for its vote."""

    reason: str = ""
    """Why there is no vote. Empty: there is one."""
    decides: bool = True
    """Whether it could have voted."""
    known: int = -1
    """The generation that has to be exceeded."""
    answered: bool = True
    gone: bool = False
    """Whether nobody is there, or it is leaving."""


class _Run:
    """A task, and what came of it."""

    def __init__(self, done: Event, task: Callable[[], Any]) -> None:
        self.done = done
        self._task = task
        self.result: Any = None
        self.error: BaseException | None = None

    def __call__(self) -> None:
        try:
            self.result = self._task()
        except BaseException as error:  # noqa: BLE001 - raised by the thread that waits
            self.error = error
        finally:
            self.done.set()

    def outcome(self) -> Any:
        """Return the result of a task that is done, or raise its error."""
        if self.error is not None:
            raise self.error
        return self.result


def _summary(size: int, voters: Sequence[str], reasons: dict[str, str]) -> str:
    said = "; ".join(f"worker {name!r}: {reason}" for name, reason in sorted(reasons.items()) if reason)
    return (
        f"{len(voters)} of {size} workers agree, and more than half have to (half, with the lowest id). "
        f"{f'{said}. ' if said else ''}A launcher that restarts workers (telegrad run --restart) needs no agreement"
    )
