"""How long does an owner keep a value that others name?

A value lives on its *owner*. Everybody else holds *forks* of the reference, each with an id of its own; the owner keeps
the set of forks that it knows of. Three rules:

1. The owner keeps the value while it knows of a fork, has a handle of its own, or is still computing the value.
2. Who passes a reference on keeps its own fork until the owner knows of the new one: the receiver asks the owner to
   accept the fork, and then tells the one that passed it on.
3. Who drops a fork tells the owner, once nothing that it passed on is still unknown there.

So a value that can be named anywhere is known to its owner by at least one fork. Messages may come in any order: the
owner makes room for a reference that it hears of before the call that creates it, and remembers a deletion that comes
before what it deletes. Each message must come once; the session sees to that.

A lost worker's forks are given up, and with them perhaps the value. What the lost worker had passed on meanwhile is
then refused: its user gets an error instead of a value that is gone. For that an owner must know, of a reference that
it does not have, whether it had it once or the call that creates it is still to come. So each worker numbers what it
creates, says with each reference which one it created there before, and the owner notes which have come. A reference
also names the life of its owner: one that is started again has nothing that its former life had.

Events are methods; they return effects, which the caller carries out, in order.

>>> owner, user = Ownership(0), Ownership(1)
>>> owner.own((0, 1, 0))
>>> fork = owner.pass_on((0, 1, 0), None, to=1, fork=(0, 2))
>>> user.received(0, fork)
[]
>>> user.dropped(fork.fork)
[Delete(to=0, rref=(0, 1, 0), fork=(0, 2))]
>>> owner.released((0, 1, 0)), owner.deleted(1, (0, 1, 0), (0, 2))
([], [Freed(rref=(0, 1, 0))])
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from telegrad.protocol.sequence_set import SequenceSet

Worker = int
Id = tuple[int, int]
"""Of a fork: the worker that made it, and a number that it never used before: a mark of its life, and a counter."""
Ref = tuple[int, int, int]
"""Of a reference: the same, of the same counter; and the mark of the owner's life."""

LIFE = 40
"""Bits of the counter."""
_COUNTER = (1 << LIFE) - 1


def _life(made: Ref) -> Id:
    """The worker that made an id, and what its ids of that life begin with."""
    return made[0], made[1] >> LIFE


@dataclass(frozen=True)
class Fork:
    """A reference on its way to another worker."""

    rref: Ref
    fork: Id
    owner: Worker


# -- effects --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RequestFork:
    """Ask the owner to accept a fork that a third worker passed on to us."""

    to: Worker
    rref: Ref
    fork: Id


@dataclass(frozen=True)
class AcceptFork:
    """Tell a user that its fork is known, or that the value is gone."""

    to: Worker
    fork: Id
    refused: bool


@dataclass(frozen=True)
class AcceptChild:
    """Tell the worker that passed a reference on that the owner knows of it."""

    to: Worker
    fork: Id


@dataclass(frozen=True)
class Delete:
    """Tell the owner that a fork is gone."""

    to: Worker
    rref: Ref
    fork: Id


@dataclass(frozen=True)
class Confirmed:
    """The owner knows of a fork of ours."""

    fork: Id


@dataclass(frozen=True)
class Refused:
    """A fork of ours names nothing any more: its owner is lost, or has given the value up."""

    fork: Id
    owner_lost: bool


@dataclass(frozen=True)
class Freed:
    """Nobody can name a value of ours any more."""

    rref: Ref


@dataclass(frozen=True)
class Orphaned:
    """The call that would have created a value of ours will never come: its caller is lost."""

    rref: Ref


Effect = RequestFork | AcceptFork | AcceptChild | Delete | Confirmed | Refused | Freed | Orphaned


# -- state ----------------------------------------------------------------------------------------------------


@dataclass
class _Owned:
    created: bool
    """The value is here, or the call that makes it is."""
    computing: bool = False
    handles: int = 0
    forks: dict[Id, Worker] = field(default_factory=dict)

    def needed(self) -> bool:
        return self.computing or self.handles > 0 or bool(self.forks)


@dataclass
class _Held:
    rref: Ref
    owner: Worker
    parent: Worker | None
    """Who passed it on and has not been told that the owner knows; None: nobody."""
    confirmed: bool = False
    void: bool = False
    dropped: bool = False
    children: dict[Id, Worker] = field(default_factory=dict)
    """What we passed on, and the owner may not know of yet."""


class Ownership:
    """One worker's references: the values that it owns, and the forks that it holds."""

    def __init__(self, me: Worker, gone: Callable[[Worker], bool] = lambda _: False, life: int = 0) -> None:
        self._me = me
        self._life = life  # what our ids begin with
        self._is_gone = gone  # whether a worker is lost now; one that was started again is not
        self._owned: dict[Ref, _Owned] = {}
        self._held: dict[Id, _Held] = {}
        self._parents: dict[Id, Id] = {}  # fork that we passed on -> the fork of ours that it was made from
        self._early: dict[tuple[Ref, Id], Worker] = {}  # deletions that came before what they delete
        self._lost_lives: set[Id] = set()  # workers that were lost, with what their ids of that life begin with
        self._arrivals: dict[Id, SequenceSet] = {}  # by such a life: which of the references that it created have come

    # -- the owner's values -------------------------------------------------------------------------------------

    def own(self, rref: Ref, *, computing: bool = False) -> None:
        """A value of ours gets its first handle, here."""
        self._owned[rref] = _Owned(created=True, computing=computing, handles=1)

    def created(self, rref: Ref, fork: Id, caller: Worker, after: int = -1) -> None:
        """The call came that creates a value here, for a fork of the caller's. See `computed`.

        `after`: the counter of the one that the caller created here before; -1: there was none.
        """
        owned = self._owned.setdefault(rref, _Owned(created=True))
        owned.created = owned.computing = True
        life = _life(rref)
        if life not in self._lost_lives and rref[2] == self._life:
            self._arrivals.setdefault(life, SequenceSet()).came(rref[1] & _COUNTER, after)
        self._add_fork(owned, rref, fork, caller)

    def computed(self, rref: Ref) -> list[Effect]:
        """That call has ended."""
        owned = self._owned.get(rref)
        if owned is None:
            return []
        owned.computing = False
        return self._settle(rref, owned)

    def released(self, rref: Ref) -> list[Effect]:
        """A handle on the owner is gone."""
        owned = self._owned.get(rref)
        if owned is None:
            return []
        owned.handles -= 1
        return self._settle(rref, owned)

    def requested(self, sender: Worker, rref: Ref, fork: Id) -> list[Effect]:
        """A user asks us to accept its fork."""
        if rref not in self._owned and not self.to_come(rref):
            return [AcceptFork(sender, fork, True)]
        owned = self._owned.setdefault(rref, _Owned(created=False))
        self._add_fork(owned, rref, fork, sender)
        return [AcceptFork(sender, fork, False), *self._settle(rref, owned)]

    def deleted(self, sender: Worker, rref: Ref, fork: Id) -> list[Effect]:
        """A user has dropped its fork."""
        owned = self._owned.get(rref)
        if owned is not None and fork in owned.forks:
            del owned.forks[fork]
            return self._settle(rref, owned)
        if not self._is_gone(sender) and self.to_come(rref):
            self._early[rref, fork] = sender
        return []

    def to_come(self, rref: Ref) -> bool:
        """Whether the call that creates a reference, that we would own has not come, and still may."""
        life = _life(rref)
        if rref[0] == self._me or rref[2] != self._life or life in self._lost_lives:
            return False
        arrivals = self._arrivals.get(life)
        return arrivals is None or arrivals.to_come(rref[1] & _COUNTER)

    def _add_fork(self, owned: _Owned, rref: Ref, fork: Id, holder: Worker) -> None:
        if self._early.pop((rref, fork), None) is None and not self._is_gone(holder):
            owned.forks[fork] = holder

    def _settle(self, rref: Ref, owned: _Owned) -> list[Effect]:
        if owned.needed():
            return []
        del self._owned[rref]
        return [Freed(rref)] if owned.created else []

    # -- the user's forks ---------------------------------------------------------------------------------------

    def creating(self, rref: Ref, fork: Id, owner: Worker) -> None:
        """We are about to make a call that creates a value on its owner."""
        self._held[fork] = _Held(rref, owner, None)

    def not_created(self, fork: Id) -> None:
        """That call never left."""
        self._held.pop(fork, None)

    def answered(self, fork: Id) -> list[Effect]:
        """The call that creates a value was answered: the owner knows of our fork."""
        held = self._held.get(fork)
        if held is None or held.confirmed or held.void:
            return []
        held.confirmed = True
        return [Confirmed(fork)]

    def pass_on(self, rref: Ref, from_fork: Id | None, *, to: Worker, fork: Id) -> Fork:
        """A handle of ours (a fork, or one of the owner's: None) goes to another worker, as `fork`."""
        if from_fork is None:
            if to != self._me and not self._is_gone(to):
                self._owned[rref].forks[fork] = to
            elif to == self._me:
                self._owned[rref].handles += 1  # until it has come
            return Fork(rref, fork, self._me)
        held = self._held[from_fork]
        if not held.void and not self._is_gone(to) and not self._is_gone(held.owner):
            held.children[fork] = to
            self._parents[fork] = from_fork
        return Fork(rref, fork, held.owner)

    def not_sent(self, fork: Fork, to: Worker) -> list[Effect]:
        """What was to be passed on never left."""
        if fork.owner != self._me:
            return self.child_accepted(fork.fork)
        owned = self._owned.get(fork.rref)
        if owned is None:
            return []
        if to == self._me:
            owned.handles -= 1
        owned.forks.pop(fork.fork, None)
        return self._settle(fork.rref, owned)

    def received(self, sender: Worker, fork: Fork) -> list[Effect]:
        """Another worker passed a reference on to us. On its owner it becomes a handle, elsewhere a fork."""
        if fork.owner == self._me:
            if sender == self._me:
                return []  # counted when it left
            if fork.rref not in self._owned and not self.to_come(fork.rref):
                # Its user was lost with the last fork that we knew of. The handle finds nothing, and says so.
                self._owned[fork.rref] = _Owned(created=True, handles=1)
                return [AcceptChild(sender, fork.fork), Orphaned(fork.rref)]
            self._owned.setdefault(fork.rref, _Owned(created=False)).handles += 1
            return [AcceptChild(sender, fork.fork)]
        held = self._held[fork.fork] = _Held(fork.rref, fork.owner, sender)
        if self._is_gone(fork.owner):
            held.void = True
            held.parent = None
            return [Refused(fork.fork, True)]
        if sender == fork.owner:
            held.confirmed = True
            held.parent = None
            return []
        return [RequestFork(fork.owner, fork.rref, fork.fork)]

    def accepted(self, fork: Id, *, refused: bool) -> list[Effect]:
        """The owner knows of a fork of ours, or says that its value is gone."""
        held = self._held.get(fork)
        if held is None:
            return []
        effects: list[Effect] = []
        parent, held.parent = held.parent, None
        if parent is not None:
            effects.append(AcceptChild(parent, fork))
        if refused:
            held.void = True
            effects.append(Refused(fork, False))
        else:
            held.confirmed = True
            effects.append(Confirmed(fork))
        if held.dropped:
            effects += self._leave(fork, held)
        return effects

    def child_accepted(self, fork: Id) -> list[Effect]:
        """The owner knows of what we passed on."""
        parent = self._parents.pop(fork, None)
        held = self._held.get(parent) if parent is not None else None
        if parent is None or held is None:
            return []
        held.children.pop(fork, None)
        return self._leave(parent, held) if held.dropped else []

    def dropped(self, fork: Id) -> list[Effect]:
        """A fork of ours is no longer used here."""
        held = self._held.get(fork)
        if held is None or held.dropped:
            return []
        held.dropped = True
        return self._leave(fork, held)

    def _leave(self, fork: Id, held: _Held) -> list[Effect]:
        """Rule 3. A fork that is to be confirmed for its parent's sake is deleted after that."""
        if held.children or held.parent is not None:
            return []
        del self._held[fork]
        return [] if held.void else [Delete(held.owner, held.rref, fork)]

    # -- loss -----------------------------------------------------------------------------------------------------

    def lost(self, worker: Worker, life: int = 0) -> list[Effect]:
        """A worker is gone; its ids of this life began with `life`."""
        self._lost_lives.add((worker, life))
        self._arrivals.pop((worker, life), None)
        effects: list[Effect] = []
        for rref, owned in list(self._owned.items()):
            forks = [fork for fork, holder in owned.forks.items() if holder == worker]
            for fork in forks:
                del owned.forks[fork]
            if forks:
                effects += self._settle(rref, owned)
            if rref in self._owned and not owned.created and _life(rref) == (worker, life):
                owned.created = True
                effects.append(Orphaned(rref))
        self._early = {key: sender for key, sender in self._early.items() if sender != worker}
        for fork, held in list(self._held.items()):
            # A parent that is lost changes nothing: the owner has been asked, and may know of other forks.
            for child, to in list(held.children.items()):
                if worker in (to, held.owner):
                    del held.children[child], self._parents[child]
            if held.owner == worker:
                held.parent = None
                if not held.void:
                    held.void = True
                    effects.append(Refused(fork, True))
            if held.dropped:
                effects += self._leave(fork, held)
        return effects

    # -- for people and tests --------------------------------------------------------------------------------------

    def has(self, rref: Ref, fork: Id | None) -> bool:
        """Whether a handle that is here counts: that of a fork, or (None) one of the owner's."""
        return fork in self._held if fork is not None else rref in self._owned

    def owns(self, rref: Ref) -> bool:
        """Whether a value is kept here, or will be."""
        return rref in self._owned

    def owned(self) -> dict[Ref, list[Worker]]:
        """The values that are kept here, and who holds forks of them."""
        return {rref: sorted(set(owned.forks.values())) for rref, owned in self._owned.items()}

    def held(self) -> dict[Id, tuple[Ref, Worker]]:
        """The forks that are held here: the reference, and its owner."""
        return {fork: (held.rref, held.owner) for fork, held in self._held.items()}

    def fork_count(self) -> int:
        """How many forks of our values there are."""
        return sum(len(owned.forks) for owned in self._owned.values())
