"""Reference ids: the creator's incarnation in them, and how error messages show them."""

from __future__ import annotations

from telegrad.connection.worker_record import WorkerRecord
from telegrad.protocol.rref_ids import COUNTER_BITS, RRefId

_INCARNATION_MASK = (1 << 23) - 1


def incarnation_of(record: WorkerRecord) -> int:
    """Return the prefix of all ids that this incarnation of a worker creates."""
    return record.incarnation & _INCARNATION_MASK


def describe(rref: RRefId) -> str:
    """Return a reference id as error messages show it."""
    return f"reference {rref[0]}:{rref[1] & ((1 << COUNTER_BITS) - 1)}"
