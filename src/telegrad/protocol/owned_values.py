"""The owner's half of `ownership`: the values that one worker owns, and the forks of them that it knows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from telegrad.protocol.creations import Creations, creator_of
from telegrad.protocol.ownership_effects import AcceptFork, OwnershipEffect, ValueFreed, ValueOrphaned
from telegrad.protocol.rref_ids import ForkId, RRefId, WorkerId

SPARE_GAPS = 1000
"""Gaps in the creations of a worker that do not count as references: a call that could not be sent may leave one."""


@dataclass
class OwnedValue:
    """A value that is kept here, or will be."""

    created: bool
    """The value is here, or the call that computes it is."""
    computing: bool = False
    handles: int = 0
    forks: dict[ForkId, WorkerId] = field(default_factory=dict)

    def is_needed(self) -> bool:
        """Return whether somebody refers to it, or it is being computed."""
        return self.computing or self.handles > 0 or bool(self.forks)


class OwnedValues:
    """The values that one worker owns. `Ownership` adds the forks that it holds of the values of others."""

    def __init__(self, me: WorkerId, is_lost: Callable[[WorkerId], bool], incarnation: int) -> None:
        self._me = me
        self._is_lost = is_lost  # whether a worker is lost now; one that was restarted is not
        self.creations = Creations(me, incarnation)
        self._owned: dict[RRefId, OwnedValue] = {}
        self._early: dict[tuple[RRefId, ForkId], WorkerId] = {}  # deletions that arrived before their fork
        self._forks: Counter[WorkerId] = Counter()  # how many forks of our values each worker holds
        self.is_pending = self.creations.is_pending

    def own(self, rref: RRefId, *, computing: bool = False) -> None:
        """Add a value with one handle here."""
        self._owned[rref] = OwnedValue(created=True, computing=computing, handles=1)

    def creation_received(self, rref: RRefId, fork: ForkId, caller: WorkerId, after: int = -1) -> None:
        """Record the call that creates a value here, with a fork for the caller. `value_computed` follows.

        `after` is the counter of the RRef that the caller created here before, or -1.
        """
        owned = self._owned.setdefault(rref, OwnedValue(created=True))
        owned.created = owned.computing = True
        self.creations.arrived(rref, after)
        self._add_fork(owned, rref, fork, caller)

    def creation_refused(self, rref: RRefId, fork: ForkId, after: int = -1) -> list[OwnershipEffect]:
        """Record that the call that creates a value was refused: the value will never exist."""
        self.creations.arrived(rref, after)
        self._early.pop((rref, fork), None)
        owned = self._owned.get(rref)
        if owned is None or owned.created:
            return []
        owned.created = True
        return [ValueOrphaned(rref)]

    def value_computed(self, rref: RRefId) -> list[OwnershipEffect]:
        """Record that the call that computes a value has ended."""
        owned = self._owned.get(rref)
        if owned is None:
            return []
        owned.computing = False
        return self._settle(rref, owned)

    def release_handle(self, rref: RRefId) -> list[OwnershipEffect]:
        """Drop a handle on the owner."""
        owned = self._owned.get(rref)
        if owned is None:
            return []
        owned.handles -= 1
        return self._settle(rref, owned)

    def fork_refused(self, sender: WorkerId, rref: RRefId, fork: ForkId) -> list[OwnershipEffect]:
        """Refuse a user's request to accept its fork, because the user has too many."""
        self._early.pop((rref, fork), None)
        return [AcceptFork(sender, fork, True)]

    def fork_requested(self, sender: WorkerId, rref: RRefId, fork: ForkId) -> list[OwnershipEffect]:
        """Handle a user's request to accept its fork."""
        if rref not in self._owned and not self.is_pending(rref):
            return [AcceptFork(sender, fork, True)]
        owned = self._owned.setdefault(rref, OwnedValue(created=False))
        self._add_fork(owned, rref, fork, sender)
        return [AcceptFork(sender, fork, False), *self._settle(rref, owned)]

    def fork_deleted(self, sender: WorkerId, rref: RRefId, fork: ForkId) -> list[OwnershipEffect]:
        """Record that a user has dropped its fork."""
        owned = self._owned.get(rref)
        if owned is not None and fork in owned.forks:
            self._remove_fork(owned, fork)
            return self._settle(rref, owned)
        if not self._is_lost(sender) and self.is_pending(rref):
            self._early[rref, fork] = sender
        return []

    def _add_fork(self, owned: OwnedValue, rref: RRefId, fork: ForkId, holder: WorkerId) -> None:
        if self._early.pop((rref, fork), None) is None and not self._is_lost(holder):
            self._remove_fork(owned, fork)
            owned.forks[fork] = holder
            self._forks[holder] += 1

    def _remove_fork(self, owned: OwnedValue, fork: ForkId) -> None:
        holder = owned.forks.pop(fork, None)
        if holder is not None:
            self._forks[holder] -= 1

    def _settle(self, rref: RRefId, owned: OwnedValue) -> list[OwnershipEffect]:
        if owned.is_needed():
            return []
        del self._owned[rref]
        return [ValueFreed(rref)] if owned.created else []

    def _holder_lost(self, worker: WorkerId, incarnation: int) -> list[OwnershipEffect]:
        """Drop the forks of an incarnation that is lost."""
        creator = worker, incarnation
        self.creations.creator_lost(creator)
        effects: list[OwnershipEffect] = []
        for rref, owned in list(self._owned.items()):
            forks = [fork for fork, holder in owned.forks.items() if holder == worker]
            for fork in forks:
                self._remove_fork(owned, fork)
            if forks:
                effects += self._settle(rref, owned)
            if rref in self._owned and not owned.created and creator_of(rref) == creator:
                owned.created = True
                effects.append(ValueOrphaned(rref))
        self._early = {key: sender for key, sender in self._early.items() if sender != worker}
        return effects

    # -- inspection ---------------------------------------------------------------------------------------------

    def owns(self, rref: RRefId) -> bool:
        """Return whether a value is kept here, or will be."""
        return rref in self._owned

    def owned(self) -> dict[RRefId, list[WorkerId]]:
        """Return the values that are kept here, and the workers that hold forks of them."""
        return {rref: sorted(set(owned.forks.values())) for rref, owned in self._owned.items()}

    def early_deletions(self, worker: WorkerId) -> int:
        """Return how many deletions of a worker are kept because they arrived before their forks."""
        return sum(sender == worker for sender in self._early.values())

    def references_of(self, worker: WorkerId) -> int:
        """Return how much is kept here for a worker: its forks, early deletions, and gaps in its creations."""
        gaps = sum(gaps for (creator, _), gaps in self.creations.gaps().items() if creator == worker)
        return self._forks[worker] + self.early_deletions(worker) + max(0, gaps - SPARE_GAPS)

    def fork_count(self) -> int:
        """Return how many forks of our values are known."""
        return sum(len(owned.forks) for owned in self._owned.values())
