"""Tracks which calls that create RRefs on this owner have arrived.

An owner that does not have a value must know whether it had it before, or whether the call that creates it is still in
flight. So each worker numbers the RRefs that it creates, and says with each which one it created before it on the same
owner. An RRef id also names the owner's incarnation: a restarted owner has none of its predecessor's values.
"""

from __future__ import annotations

from telegrad.protocol.rref_ids import COUNTER_BITS, Incarnation, RRefId, WorkerId
from telegrad.protocol.sequence_set import SequenceSet

_COUNTER_MASK = (1 << COUNTER_BITS) - 1


def creator_of(rref: RRefId) -> Incarnation:
    """Return the incarnation that created an RRef."""
    return rref[0], rref[1] >> COUNTER_BITS


class Creations:
    """The creating calls that have arrived on one owner, by creator."""

    def __init__(self, me: WorkerId, incarnation: int) -> None:
        self._me = me
        self._incarnation = incarnation
        self._arrived: dict[Incarnation, SequenceSet] = {}
        self._lost: set[Incarnation] = set()

    def arrived(self, rref: RRefId, after: int) -> None:
        """Record the call that creates `rref`. `after` is the counter of the creator's previous one here, or -1."""
        creator = creator_of(rref)
        if creator not in self._lost and rref[2] == self._incarnation:
            self._arrived.setdefault(creator, SequenceSet()).add(rref[1] & _COUNTER_MASK, after)

    def is_pending(self, rref: RRefId) -> bool:
        """Return whether the call that creates `rref` here has not arrived, and still may."""
        creator = creator_of(rref)
        if rref[0] == self._me or rref[2] != self._incarnation or creator in self._lost:
            return False
        arrived = self._arrived.get(creator)
        return arrived is None or arrived.is_missing(rref[1] & _COUNTER_MASK)

    def creator_lost(self, creator: Incarnation) -> None:
        """Record that nothing more will arrive from this incarnation."""
        self._lost.add(creator)
        self._arrived.pop(creator, None)

    def gaps(self) -> dict[Incarnation, int]:
        """Return the number of gaps in what has arrived, by creator: the memory that it takes."""
        return {creator: arrived.gaps() for creator, arrived in self._arrived.items()}
