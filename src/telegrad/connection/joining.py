"""How a worker joins a group that exists: it gets a generation, and introduces itself to all members.

`telegrad.protocol.membership` has the rules. A newcomer without an authority asks all members for their votes until it
has a quorum. It asks those again that hold its predecessor for alive: it may take them some time to notice its death.
Then it connects to every member. Each of them answers with all members that it knows and with its votes, and the
newcomer connects to those that are new to it, too. Of two newcomers that come at the same time, one comes second at any
member, and learns about the other there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import msgspec

from telegrad.connection.handshake import Refused, StaleGeneration
from telegrad.connection.local_worker import LocalWorker
from telegrad.connection.peers import Peers
from telegrad.connection.worker_record import WorkerRecord
from telegrad.errors import NotAMember, TelegradError, WorkerLost
from telegrad.execution.executor import GuaranteedTask
from telegrad.protocol.membership import Vote
from telegrad.waiting import Event
from telegrad.waiting_report import WaitingReport
from telegrad.wire.handshake_messages import Purpose

_log = logging.getLogger("telegrad")

SERVICE = "@telegrad.members"
_PAUSE = 0.2  # seconds between two rounds of votes
_MAX_PAUSE = 1.0
_ATTEMPT = 3.0  # seconds that one member may take to answer a request for its vote

CallWorker = Callable[..., Any]


def probe(peers: Peers, me: WorkerRecord, target: WorkerRecord, deadline: float) -> str:
    """Return whether a worker is there: "alive", "leaving", "gone", or "silent" if it does not answer in time."""
    try:
        peers.connector.dialer.ask(me, target, Purpose.PROBE, deadline)
    except Refused as refused:
        return "leaving" if refused.code == "leaving" else "alive"
    except TimeoutError:
        return "silent"
    except (OSError, TelegradError):
        return "gone"
    return "alive"


class Joining:
    """Joins a group with the members that were found."""

    def __init__(self, local: LocalWorker, peers: Peers, call: CallWorker) -> None:
        self._local = local
        self._peers = peers
        self._call = call

    # -- on members -------------------------------------------------------------------------------------------

    def describe(self) -> tuple[list[Any], list[Any]]:
        """Return all members and votes that this worker knows, as plain data. Served to newcomers."""
        votes = self._peers.members.votes()
        return (
            [msgspec.to_builtins(peer.record) for peer in self._peers.all()],
            [[name, vote.generation, vote.incarnation, vote.at] for name, vote in votes.items()],
        )

    # -- on the newcomer --------------------------------------------------------------------------------------

    def get_votes(self, records: Sequence[WorkerRecord], deadline: float) -> int:
        """Return a generation for which a quorum of the members has voted. Raises NotAMember if none has in time."""
        local, members, me = self._local, self._peers.members, self._local.me
        others = [record for record in records if record.name != me.name]
        generation = max((record.generation for record in records if record.name == me.name), default=-1) + 1
        report, pause = WaitingReport(local.runtime.now()), _PAUSE
        while True:
            candidate = msgspec.structs.replace(me, generation=generation)
            until = min(deadline, local.runtime.now() + _ATTEMPT)
            answers = self._ask_all(candidate, others, until)
            reasons = {name: answer.reason for name, answer in answers.items()}
            voters = [name for name, reason in reasons.items() if not reason]
            if members.is_quorum(me.name, voters):
                return generation
            generation = max([generation, *(answer.known + 1 for answer in answers.values())])
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
            local.executor.wait(local.runtime.event(), now + pause)
            pause = min(2 * pause, _MAX_PAUSE)

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
            return _Answer(refused.reason, decides=refused.code == "vote")
        except (OSError, TelegradError) as error:
            return _Answer(f"it does not answer ({error})", decides=False)
        return _Answer()

    def introduce(self) -> None:
        """Connect to all members, learn what they know, and connect to those that are new here."""
        members, me = self._peers.members, self._local.me
        introduced: dict[str, int] = {me.name: me.incarnation}
        answered: list[str] = []
        while True:
            due = [
                peer.record
                for peer in self._peers.all()
                if not peer.gone and introduced.get(peer.record.name) != peer.record.incarnation
            ]
            if not due:
                break
            introduced.update((record.name, record.incarnation) for record in due)
            replies = self._in_parallel([partial(self._introduce_to, record.name) for record in due])
            for record, reply in zip(due, replies, strict=True):
                if reply is not None:
                    answered.append(record.name)
                    self._learn(*reply)
        members.set_voting(members.is_quorum(me.name, answered))

    def _introduce_to(self, name: str) -> tuple[list[Any], list[Any]] | None:
        try:
            known, votes = self._call(name, SERVICE, (), timeout=0.0)
        except WorkerLost as error:
            _log.info("worker %r could not introduce itself to worker %r: %s", self._local.name, name, error)
            return None
        return known, votes

    def _learn(self, known: list[Any], votes: list[Any]) -> None:
        for data in known:
            record = msgspec.convert(data, WorkerRecord)
            if record.name != self._local.name:
                self._peers.learn(record)
        self._peers.members.merge_votes([(name, Vote(*vote)) for name, *vote in votes])

    def _in_parallel(self, tasks: Iterable[Callable[[], Any]]) -> list[Any]:
        """Run the tasks on threads of the executor, and return their results."""
        runs = [_Run(self._local.runtime.event(), task) for task in tasks]
        self._local.executor.submit_all([GuaranteedTask(run) for run in runs])
        for run in runs:
            self._local.executor.wait(run.done, None)
        for run in runs:
            if run.error is not None:
                raise run.error
        return [run.result for run in runs]


class _Answer(NamedTuple):
    """What a member says to a request for its vote."""

    reason: str = ""
    """Why there is no vote. Empty: there is one."""
    decides: bool = True
    """Whether it could have voted."""
    known: int = -1
    """The generation that has to be exceeded."""


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


def _summary(size: int, voters: Sequence[str], reasons: dict[str, str]) -> str:
    said = "; ".join(f"worker {name!r}: {reason}" for name, reason in sorted(reasons.items()) if reason)
    return (
        f"{len(voters)} of {size} workers agree, and more than half have to (half, with the lowest id). {said}. A "
        "launcher that restarts workers (telegrad run --restart) needs no agreement"
    )
