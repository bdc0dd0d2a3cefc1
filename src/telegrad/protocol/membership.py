"""Who belongs to a group, in which incarnation, and who may take the place of whom.

Names and ids are stable, incarnations change. Every incarnation of a worker has a *generation*, 0 for the first. A
worker that takes the place of another one of the same name has a higher generation, and members accept it for that
reason alone. But whoever holds the earlier one for alive declares it lost first (`Admission.DISPLACES`): much is known
by the name or id of a worker, and must be forgotten before the next worker has them. A generation must be unique, and
there are two ways to get one:

- From an *authority*: a launcher that starts at most one process for each name at a time, and counts the starts.
- From a *quorum*. The newcomer asks all members, and each one votes for at most one incarnation in each generation. A
  quorum is more than half of all names, or half of them including the lowest id. The newcomer's own name has no vote.
  Two quorums have a voter in common, so no two incarnations get the same generation: of the two sides of a partition,
  at most one can replace a worker. It is the side with the quorum.

A member votes for a newcomer only if it holds the worker that the newcomer would replace for lost, or if that one has
left. After a vote it votes for no other newcomer of that name for a while (`HOLD`), unless that one has become a member
and is gone again, so that one of two can succeed. The vote of a member that was replaced is not forgotten: its
replacement does not vote until a quorum has told it what they have voted for (`merge`).

In a group whose workers do not trust each other, members may lie. So nobody may skip more than MAX_STEP generations:
otherwise one lie would use them up, and a name could never be given again. And what a member says of others (`learn`,
`merge`) is about names and ids that the group can have.

In an *open* group, workers with new names join without votes, and so do those with the names of workers that have left.
Two sides of a partition may both admit such a worker; each then refuses the other's. A side counts those that joined
it, so if workers join on both sides while a partition lasts, both may have a quorum.

Time is passed in, and nothing here does I/O.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from enum import Enum, IntEnum
from typing import NamedTuple, Protocol

MAX_STEP = 2**32
"""How much higher the generation of a worker may be than that of the one before it. Launchers count by 65,536."""
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
    DISPLACES = 3
    """It will replace a worker that is held for alive. Nothing has changed: declare that one lost, and ask again."""


class NotAdmitted(Exception):
    """A worker may not connect; `code` tells it whether another incarnation could."""

    def __init__(self, code: str, reason: str) -> None:
        super().__init__(reason)
        self.code = code


class Formed(Protocol):
    """The members with which a group was formed, in a form that need not have all of them at hand."""

    def find(self, name: str) -> Identity | None:
        """Return the member with a name."""

    def __iter__(self) -> Iterator[Identity]: ...


class Membership:
    """The group as one worker, `me`, knows it."""

    def __init__(self, me: Identity, now: float, *, is_open: bool = False) -> None:
        self.me = me
        self.is_open = is_open
        """Whether workers with new names may join."""
        self.may_vote = True
        """Whether this worker knows how a quorum has voted. If not, it must not be asked for its `vote`."""
        self._began = now
        self._formed: Formed | None = None  # members that are not in `_members` are as they were then
        self._members = {me.name: Member(me, State.ALIVE, now)}
        self._votes: dict[str, Vote] = {}

    # -- what is known ----------------------------------------------------------------------------------------

    def form(self, members: Formed) -> None:
        """Start with these members, which are alive."""
        self._formed = members

    def find(self, name: str) -> Member | None:
        """Return the latest incarnation of a worker."""
        member = self._members.get(name)
        if member is None and self._formed is not None:
            identity = self._formed.find(name)
            if identity is not None:
                member = self._members[name] = Member(identity, State.ALIVE, self._began)
        return member

    def members(self) -> list[Member]:
        """Return all members, by id."""
        return sorted(self._all().values(), key=lambda member: member.identity.id)

    def _all(self) -> dict[str, Member]:
        if self._formed is not None:
            for identity in self._formed:
                self._members.setdefault(identity.name, Member(identity, State.ALIVE, self._began))
            self._formed = None
        return self._members

    def votes(self) -> dict[str, Vote]:
        """Return for whom this worker, or those that told it, have voted last, by name."""
        return dict(self._votes)

    def known_generation(self, newcomer: Identity) -> int:
        """Return the highest generation in which others of the newcomer's name are known, or have a vote; -1: none."""
        member, vote = self.find(newcomer.name), self._votes.get(newcomer.name)
        return max(
            member.identity.generation if member and member.identity.incarnation != newcomer.incarnation else -1,
            vote.generation if vote and vote.incarnation != newcomer.incarnation else -1,
        )

    def is_quorum(self, newcomer: str, voters: Collection[str]) -> bool:
        """Return whether the votes of these members suffice for a newcomer with this name."""
        ids = {
            member.identity.name: member.identity.id
            for member in self._all().values()
            if member.state is not State.LEFT or member.identity.name == newcomer
        }
        counted = {name for name in voters if name in ids and name != newcomer}
        if 2 * len(counted) != len(ids):
            return 2 * len(counted) > len(ids)
        return min(ids, key=lambda name: ids[name]) in counted

    # -- changes ----------------------------------------------------------------------------------------------

    def add(self, identity: Identity, now: float) -> bool:
        """Take over what another member says about a worker. Returns whether this incarnation of it was new.

        In an open group a worker may be known before a quorum has given it its generation, which then grows.
        """
        member = self.find(identity.name)
        if member is not None and member.identity.generation >= identity.generation:
            return False
        if member is not None and member.identity.incarnation == identity.incarnation:
            self._members[identity.name] = replace(member, identity=identity)
            return False
        self._members[identity.name] = Member(identity, State.ALIVE, now)
        return True

    def learn(self, identity: Identity, now: float) -> Admission:
        """Take over what another member says about a worker, if it can be. KNOWN: it is not new, or cannot be."""
        member = self.find(identity.name)
        if member is None:
            if not self.is_open or self._has_id(identity.id) or identity.generation > MAX_STEP:
                return Admission.KNOWN
            self.add(identity, now)
            return Admission.JOINED
        known = member.identity
        if known.id != identity.id or not known.generation < identity.generation <= known.generation + MAX_STEP:
            return Admission.KNOWN
        if member.state is State.ALIVE and known.incarnation != identity.incarnation:
            return Admission.DISPLACES
        return Admission.REPLACES if self.add(identity, now) else Admission.KNOWN

    def _has_id(self, worker_id: int) -> bool:
        return any(known.identity.id == worker_id for known in self._all().values())

    def gone(self, name: str, incarnation: int, state: State, now: float) -> bool:
        """Record that a worker was lost or has left. Returns whether that was new."""
        member = self.find(name)
        if member is None or member.identity.incarnation != incarnation or member.state is not State.ALIVE:
            return False
        self._members[name] = replace(member, state=state, since=now)
        return True

    def admit(self, identity: Identity, now: float) -> Admission:
        """Decide about a worker that connects and has proved itself. Raises NotAdmitted."""
        name, worker_id, incarnation, generation = identity
        member = self.find(name)
        if member is None:
            if not self.is_open or self._has_id(worker_id):
                raise NotAdmitted("name", f"there is no worker {name!r} with id {worker_id} in this group")
            if generation > MAX_STEP:
                raise NotAdmitted("generation", f"generation {generation} of worker {name!r} is not its first one")
            self._members[name] = Member(identity, State.ALIVE, now)
            return Admission.JOINED
        known = member.identity
        if known.id != worker_id:
            raise NotAdmitted("name", f"there is no worker {name!r} with id {worker_id} in this group")
        if name == self.me.name and identity != known:
            raise NotAdmitted("name", f"worker {name!r} is this worker")
        if generation > known.generation + MAX_STEP:
            raise NotAdmitted("generation", f"generation {generation} of worker {name!r} is far ahead of the last one")
        if known.incarnation == incarnation:
            if known.generation < generation:
                self._members[name] = replace(member, identity=identity)
            return Admission.KNOWN
        if self.is_open and member.state is State.LEFT and generation >= known.generation:
            self._members[name] = Member(identity, State.ALIVE, now)
            return Admission.REPLACES
        if generation < known.generation:
            raise NotAdmitted(
                "incarnation", f"this incarnation of worker {name!r} was replaced by a later one: restart it"
            )
        if generation == known.generation:
            raise NotAdmitted(
                "incarnation", f"another process is worker {name!r} of this group: give each worker its own name"
            )
        if member.state is State.ALIVE:
            return Admission.DISPLACES
        self._members[name] = Member(identity, State.ALIVE, now)
        return Admission.REPLACES

    # -- votes ------------------------------------------------------------------------------------------------

    def vote(self, identity: Identity, now: float) -> str:
        """Vote for a newcomer. Returns why not, or nothing if it has this worker's vote."""
        name, worker_id, incarnation, generation = identity
        member = self.find(name)
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
        if generation > self.known_generation(identity) + MAX_STEP:
            return f"generation {generation} of worker {name!r} is far ahead of the last one"
        vote = self._votes.get(name)
        if vote is not None and vote.incarnation != incarnation:
            if generation <= vote.generation:
                return f"it has voted for another process in generation {vote.generation}"
            if now < vote.at + HOLD and member.identity.generation < vote.generation:
                return f"it has just voted for another process that wants to be worker {name!r}"
        self._votes[name] = Vote(generation, incarnation, now)
        return ""

    def merge(self, votes: Iterable[tuple[str, Vote]]) -> None:
        """Take over for whom another member has voted."""
        for name, vote in votes:
            member, mine = self.find(name), self._votes.get(name)
            if member is None or vote.generation > member.identity.generation + MAX_STEP:
                continue
            if mine is None or mine.generation < vote.generation:
                self._votes[name] = vote
