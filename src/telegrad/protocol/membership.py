"""Who belongs to a group, in which incarnation, and who may take the place of whom.

Names and ids are stable, incarnations change. Every incarnation of a worker has a *generation*, 0 for the first. A
worker that takes the place of another one of the same name has a higher generation, and members accept it for that
reason alone. So the generation must be unique, and there are two ways to get one:

- From an *authority*: a launcher that starts at most one process for each name at a time, and counts the starts.
- From a *quorum*. The newcomer asks all members, and each one votes for at most one incarnation in each generation. A
  quorum is more than half of all names, or half of them including the lowest id. The newcomer's own name has no vote.
  Two quorums have a voter in common, so no two incarnations get the same generation: of the two sides of a partition,
  at most one can replace a worker. It is the side with the quorum.

A member votes for a newcomer only if it holds the worker that the newcomer would replace for lost, or if that one has
left. After a vote it votes for no other newcomer of that name for a while (`HOLD`), so that one of two can succeed. The
vote of a member that was replaced is not forgotten: its replacement does not vote until a quorum has told it what they
have voted for (`merge`).

In an *open* group, workers with new names join without votes. Two sides of a partition may both admit a worker with the
same new name; each then refuses the other's.

Time is passed in, and nothing here does I/O.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from enum import Enum, IntEnum
from typing import NamedTuple

HOLD = 10.0
"""Seconds for which a member that has voted for a newcomer votes for no other one of the same name."""


class State(IntEnum):
    """What a member holds another one for. The numbers are sent."""

    ALIVE = 0
    LOST = 1
    LEFT = 2


class Identity(NamedTuple):
    """One incarnation of a worker."""

    name: str
    id: int
    incarnation: int
    generation: int


@dataclass(frozen=True, slots=True)
class Member:
    """The latest incarnation of a worker, as this worker knows it."""

    identity: Identity
    state: State
    since: float
    """When it got into this state."""


class Vote(NamedTuple):
    """For whom a member voted last, of one name."""

    generation: int
    incarnation: int
    at: float


class Admission(Enum):
    """What a member makes of a worker that connects to it."""

    KNOWN = 0
    JOINED = 1
    REPLACES = 2


class NotAdmitted(Exception):
    """A worker may not connect; `code` tells it whether another incarnation could."""

    def __init__(self, code: str, reason: str) -> None:
        super().__init__(reason)
        self.code = code


class Membership:
    """The group as one worker, `me`, knows it."""

    def __init__(self, me: Identity, now: float, *, is_open: bool = False) -> None:
        self.me = me
        self.is_open = is_open
        """Whether workers with new names may join."""
        self.may_vote = True
        """Whether this worker knows how a quorum has voted. If not, it must not be asked for its `vote`."""
        self._members = {me.name: Member(me, State.ALIVE, now)}
        self._votes: dict[str, Vote] = {}

    # -- what is known ----------------------------------------------------------------------------------------

    def find(self, name: str) -> Member | None:
        """Return the latest incarnation of a worker."""
        return self._members.get(name)

    def members(self) -> list[Member]:
        """Return all members, by id."""
        return sorted(self._members.values(), key=lambda member: member.identity.id)

    def votes(self) -> dict[str, Vote]:
        """Return for whom this worker, or those that told it, have voted last, by name."""
        return dict(self._votes)

    def known_generation(self, newcomer: Identity) -> int:
        """Return the highest generation in which others of the newcomer's name are known, or have a vote; -1: none."""
        member, vote = self._members.get(newcomer.name), self._votes.get(newcomer.name)
        return max(
            member.identity.generation if member and member.identity.incarnation != newcomer.incarnation else -1,
            vote.generation if vote and vote.incarnation != newcomer.incarnation else -1,
        )

    def is_quorum(self, newcomer: str, voters: Collection[str]) -> bool:
        """Return whether the votes of these members suffice for a newcomer with this name."""
        ids = {
            member.identity.name: member.identity.id
            for member in self._members.values()
            if member.state is not State.LEFT or member.identity.name == newcomer
        }
        counted = {name for name in voters if name in ids and name != newcomer}
        if 2 * len(counted) != len(ids):
            return 2 * len(counted) > len(ids)
        return min(ids, key=lambda name: ids[name]) in counted

    # -- changes ----------------------------------------------------------------------------------------------

    def add(self, identity: Identity, now: float) -> bool:
        """Take over what another member says about a worker. Returns whether that was new."""
        member = self._members.get(identity.name)
        if member is not None and member.identity.generation >= identity.generation:
            return False
        self._members[identity.name] = Member(identity, State.ALIVE, now)
        return True

    def gone(self, name: str, incarnation: int, state: State, now: float) -> bool:
        """Record that a worker was lost or has left. Returns whether that was new."""
        member = self._members.get(name)
        if member is None or member.identity.incarnation != incarnation or member.state is not State.ALIVE:
            return False
        self._members[name] = replace(member, state=state, since=now)
        return True

    def admit(self, identity: Identity, now: float) -> Admission:
        """Decide about a worker that connects and has proved itself. Raises NotAdmitted."""
        name, worker_id, incarnation, generation = identity
        member = self._members.get(name)
        if member is None:
            if not self.is_open or any(known.identity.id == worker_id for known in self._members.values()):
                raise NotAdmitted("name", f"there is no worker {name!r} with id {worker_id} in this group")
            self._members[name] = Member(identity, State.ALIVE, now)
            return Admission.JOINED
        known = member.identity
        if known.id != worker_id:
            raise NotAdmitted("name", f"there is no worker {name!r} with id {worker_id} in this group")
        if known.incarnation == incarnation:
            return Admission.KNOWN
        if name == self.me.name:
            raise NotAdmitted("name", f"worker {name!r} is this worker")
        if generation < known.generation:
            raise NotAdmitted(
                "incarnation", f"this incarnation of worker {name!r} was replaced by a later one: restart it"
            )
        if generation == known.generation:
            raise NotAdmitted(
                "incarnation", f"another process is worker {name!r} of this group: give each worker its own name"
            )
        self._members[name] = Member(identity, State.ALIVE, now)
        return Admission.REPLACES

    # -- votes ------------------------------------------------------------------------------------------------

    def vote(self, identity: Identity, now: float) -> str:
        """Vote for a newcomer. Returns why not, or nothing if it has this worker's vote."""
        name, worker_id, incarnation, generation = identity
        member = self._members.get(name)
        if member is None:
            return "" if self.is_open else f"there is no worker {name!r} in this group"
        if member.identity.incarnation == incarnation:
            return ""
        if member.identity.id != worker_id:
            return f"worker {name!r} has id {member.identity.id}, not {worker_id}"
        if member.state is State.ALIVE:
            return f"another process is worker {name!r}, and it is alive"
        if generation <= member.identity.generation:
            return f"generation {generation} of worker {name!r} is over"
        vote = self._votes.get(name)
        if vote is not None and vote.incarnation != incarnation:
            if generation <= vote.generation:
                return f"it has voted for another process in generation {vote.generation}"
            if now < vote.at + HOLD:
                return f"it has just voted for another process that wants to be worker {name!r}"
        self._votes[name] = Vote(generation, incarnation, now)
        return ""

    def merge(self, votes: Iterable[tuple[str, Vote]]) -> None:
        """Take over for whom another member has voted."""
        for name, vote in votes:
            mine = self._votes.get(name)
            if mine is None or mine.generation < vote.generation:
                self._votes[name] = vote
