"""Distributed reference counting: how long an owner keeps a value that other workers refer to.

A value lives on its *owner*. Every other worker holds *forks* of the RRef, each with its own id. The owner keeps the
set of forks that it knows. Three rules:

1. The owner keeps the value while it knows a fork, has a handle itself, or is still computing the value.
2. A worker that sends an RRef on keeps its own fork until the owner knows the new one: the receiver asks the owner to
   accept the fork, then tells the worker that sent it.
3. A worker that drops a fork tells the owner, once the owner knows every fork that was made from it.

So the owner knows at least one fork of any value that is referred to anywhere. Messages may arrive in any order: the
owner makes room for an RRef that is mentioned before the call that creates it, and remembers a deletion that arrives
before the fork that it deletes. Each message must arrive exactly once, which the session guarantees.

When a worker is lost, its forks are dropped, and perhaps the value with them. Forks that the lost worker had sent on
are then refused: their users get an error instead of a value that is gone (see `creations`).

Events are methods. They return effects, which the caller carries out in order.

>>> owner, user = Ownership(0), Ownership(1)
>>> owner.own((0, 1, 0))
>>> fork = owner.prepare_fork((0, 1, 0), None, to=1, fork=(0, 2))
>>> user.fork_received(0, fork)
[]
>>> user.drop_fork(fork.fork)
[DeleteFork(to=0, rref=(0, 1, 0), fork=(0, 2))]
>>> owner.release_handle((0, 1, 0)), owner.fork_deleted(1, (0, 1, 0), (0, 2))
([], [ValueFreed(rref=(0, 1, 0))])
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from telegrad.protocol.owned_values import OwnedValue, OwnedValues
from telegrad.protocol.ownership_effects import (
    AcceptChild,
    DeleteFork,
    ForkConfirmed,
    ForkRefused,
    OwnershipEffect,
    RequestFork,
    ValueUnknown,
)
from telegrad.protocol.rref_ids import ForkData, ForkId, RRefId, WorkerId


@dataclass
class _HeldFork:
    rref: RRefId
    owner: WorkerId
    parent: WorkerId | None
    """The worker that sent it and has not been told that the owner knows it; None: nobody."""
    confirmed: bool = False
    void: bool = False
    dropped: bool = False
    children: dict[ForkId, WorkerId] = field(default_factory=dict)
    """Forks made from this one that the owner may not know yet, and who gets them."""


class Ownership(OwnedValues):
    """One worker's RRefs: the values that it owns, and the forks that it holds."""

    def __init__(
        self, me: WorkerId, is_lost: Callable[[WorkerId], bool] = lambda _: False, incarnation: int = 0
    ) -> None:
        super().__init__(me, is_lost, incarnation)
        self._held: dict[ForkId, _HeldFork] = {}
        self._parents: dict[ForkId, ForkId] = {}  # fork that we sent -> the fork of ours that it was made from

    # -- forks held here ----------------------------------------------------------------------------------------

    def start_creation(self, rref: RRefId, fork: ForkId, owner: WorkerId) -> None:
        """Add the fork for a call that creates a value on its owner, before the call is sent."""
        self._held[fork] = _HeldFork(rref, owner, None)

    def cancel_creation(self, fork: ForkId) -> None:
        """Undo `start_creation`: the call was not sent."""
        self._held.pop(fork, None)

    def creation_confirmed(self, fork: ForkId) -> list[OwnershipEffect]:
        """Record the reply to the creating call: the owner knows our fork."""
        held = self._held.get(fork)
        if held is None or held.confirmed or held.void:
            return []
        held.confirmed = True
        return [ForkConfirmed(fork)]

    def prepare_fork(self, rref: RRefId, parent: ForkId | None, *, to: WorkerId, fork: ForkId) -> ForkData:
        """Make `fork`, to be sent to another worker, from a fork held here or (None) from a handle on the owner."""
        if parent is None:
            if to != self._me and not self._is_lost(to):
                self._add_fork(self._owned[rref], rref, fork, to)
            elif to == self._me:
                self._owned[rref].handles += 1  # held while it is in flight
            return ForkData(rref, fork, self._me)
        held = self._held[parent]
        if not held.void and not self._is_lost(to) and not self._is_lost(held.owner):
            held.children[fork] = to
            self._parents[fork] = parent
        return ForkData(rref, fork, held.owner)

    def cancel_fork(self, fork: ForkData, to: WorkerId) -> list[OwnershipEffect]:
        """Undo `prepare_fork`: the fork was not sent."""
        if fork.owner != self._me:
            return self.child_accepted(fork.fork)
        owned = self._owned.get(fork.rref)
        if owned is None:
            return []
        if to == self._me:
            owned.handles -= 1
        self._remove_fork(owned, fork.fork)
        return self._settle(fork.rref, owned)

    def fork_received(self, sender: WorkerId, fork: ForkData) -> list[OwnershipEffect]:
        """Record an RRef sent by another worker. On its owner it becomes a handle, elsewhere a fork."""
        if fork.owner == self._me:
            if sender == self._me:
                return []  # counted when it was sent
            if fork.rref not in self._owned and not self.is_pending(fork.rref):
                # Its user was lost with the last fork that we knew, or an earlier process of this worker had it. The
                # handle finds no value, and says so.
                self._owned[fork.rref] = OwnedValue(created=True, handles=1)
                return [AcceptChild(sender, fork.fork), ValueUnknown(fork.rref)]
            self._owned.setdefault(fork.rref, OwnedValue(created=False)).handles += 1
            return [AcceptChild(sender, fork.fork)]
        held = self._held[fork.fork] = _HeldFork(fork.rref, fork.owner, sender)
        if self._is_lost(fork.owner):
            held.void = True
            held.parent = None
            # The owner may be lost only to this worker, and the sender must not keep its own fork for this one.
            return [AcceptChild(sender, fork.fork), ForkRefused(fork.fork, True)]
        if sender == fork.owner:
            held.confirmed = True
            held.parent = None
            return []
        return [RequestFork(fork.owner, fork.rref, fork.fork)]

    def fork_rejected(self, sender: WorkerId, fork: ForkData) -> list[OwnershipEffect]:
        """Return what tells the sender that a fork that it sent is not used here: the message was refused."""
        if fork.owner == sender:
            return [DeleteFork(sender, fork.rref, fork.fork)]
        return [AcceptChild(sender, fork.fork)]  # so that it need not keep its own fork for this one

    def fork_accepted(self, fork: ForkId, *, refused: bool) -> list[OwnershipEffect]:
        """Record the owner's reply to a request: it knows our fork, or the value is gone."""
        held = self._held.get(fork)
        if held is None:
            return []
        effects: list[OwnershipEffect] = []
        parent, held.parent = held.parent, None
        if parent is not None:
            effects.append(AcceptChild(parent, fork))
        if refused:
            held.void = True
            effects.append(ForkRefused(fork, False))
        else:
            held.confirmed = True
            effects.append(ForkConfirmed(fork))
        if held.dropped:
            effects += self._delete(fork, held)
        return effects

    def child_accepted(self, fork: ForkId) -> list[OwnershipEffect]:
        """Record that the owner knows a fork that we sent."""
        parent = self._parents.pop(fork, None)
        held = self._held.get(parent) if parent is not None else None
        if parent is None or held is None:
            return []
        held.children.pop(fork, None)
        return self._delete(parent, held) if held.dropped else []

    def drop_fork(self, fork: ForkId) -> list[OwnershipEffect]:
        """Drop a fork that is no longer used here."""
        held = self._held.get(fork)
        if held is None or held.dropped:
            return []
        held.dropped = True
        return self._delete(fork, held)

    def _delete(self, fork: ForkId, held: _HeldFork) -> list[OwnershipEffect]:
        """Apply rule 3. A fork that must be confirmed first, because its parent waits for that, is deleted later."""
        if held.children or held.parent is not None:
            return []
        del self._held[fork]
        return [] if held.void else [DeleteFork(held.owner, held.rref, fork)]

    # -- lost workers -------------------------------------------------------------------------------------------

    def worker_lost(self, worker: WorkerId, incarnation: int = 0) -> list[OwnershipEffect]:
        """Drop the forks of an incarnation that is lost, and void our forks of its values."""
        effects = self._holder_lost(worker, incarnation)
        for fork, held in list(self._held.items()):
            # A lost parent changes nothing: the owner was asked, and may know other forks.
            for child, to in list(held.children.items()):
                if worker in (to, held.owner):
                    del held.children[child], self._parents[child]
            if held.owner == worker:
                parent, held.parent = held.parent, None
                if parent is not None:  # to which the owner may not be lost
                    effects.append(AcceptChild(parent, fork))
                if not held.void:
                    held.void = True
                    effects.append(ForkRefused(fork, True))
            if held.dropped:
                effects += self._delete(fork, held)
        return effects

    # -- inspection ---------------------------------------------------------------------------------------------

    def has_handle(self, rref: RRefId, fork: ForkId | None) -> bool:
        """Return whether a handle here counts: that of a fork, or (None) one on the owner."""
        return fork in self._held if fork is not None else rref in self._owned

    def owner_of(self, fork: ForkId) -> WorkerId | None:
        """Return the owner of a fork that is held here."""
        held = self._held.get(fork)
        return None if held is None else held.owner

    def receiver_of(self, fork: ForkId) -> WorkerId | None:
        """Return to whom a fork was sent that was made from one held here."""
        parent = self._parents.get(fork)
        return None if parent is None else self._held[parent].children.get(fork)

    def held_forks(self) -> dict[ForkId, tuple[RRefId, WorkerId]]:
        """Return the forks that are held here, each with its RRef and owner."""
        return {fork: (held.rref, held.owner) for fork, held in self._held.items()}
