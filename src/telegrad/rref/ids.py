"""Ids of references and forks: how a worker makes new ones, and how error messages show them."""

from __future__ import annotations

import itertools

from telegrad.connection.worker_record import WorkerRecord
from telegrad.protocol.rref_ids import COUNTER_BITS, ForkId, Incarnation, RRefId

_INCARNATION_MASK = (1 << 23) - 1
_COUNTER_MASK = (1 << COUNTER_BITS) - 1


def incarnation_of(record: WorkerRecord) -> int:
    """Return the prefix of all ids that this incarnation of a worker creates."""
    return record.incarnation & _INCARNATION_MASK


def describe(rref: RRefId) -> str:
    """Return a reference id as error messages show it."""
    return f"reference {rref[0]}:{rref[1] & _COUNTER_MASK}"


class NewIds:
    """Makes the ids of the references and forks that one worker creates. The lock of the `RRefContext` protects it."""

    def __init__(self, me: WorkerRecord) -> None:
        self._me = me.id
        self._prefix = incarnation_of(me) << COUNTER_BITS
        self._serials = itertools.count()
        self._latest: dict[Incarnation, int] = {}  # by owner: the serial of our last reference there

    def new_fork(self) -> ForkId:
        """Return a new fork id."""
        return self._me, self._prefix | next(self._serials)

    def new_rref(self, owner: WorkerRecord) -> tuple[RRefId, int]:
        """Return a new reference id, and the serial of the previous reference created on the same owner, or -1."""
        incarnation = incarnation_of(owner)
        serial = next(self._serials)
        previous = self._latest.get((owner.id, incarnation), -1)
        self._latest[owner.id, incarnation] = serial
        return (self._me, self._prefix | serial, incarnation), previous

    def forget_rref(self, owner: WorkerRecord, rref: RRefId, previous: int) -> None:
        """Undo `new_rref`, if it was the last: the owner would wait for a reference that is never created."""
        key = owner.id, incarnation_of(owner)
        if self._latest.get(key) == rref[1] & _COUNTER_MASK:
            self._latest[key] = previous

    def owner_lost(self, owner: WorkerRecord) -> None:
        """Forget the references that were created on an owner that is lost."""
        self._latest.pop((owner.id, incarnation_of(owner)), None)
