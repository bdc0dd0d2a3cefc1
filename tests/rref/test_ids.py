"""Reference ids in messages and error texts."""

from __future__ import annotations

from telegrad.connection.worker_record import WorkerRecord
from telegrad.protocol.rref_ids import COUNTER_BITS
from telegrad.rref.ids import NewIds, describe, incarnation_of


def test_error_texts_show_creator_and_counter_of_a_reference() -> None:
    assert describe((3, 5 << COUNTER_BITS | 7, 9)) == "reference 3:7"


def test_incarnations_fit_into_an_id_and_differ_between_restarts() -> None:
    first, second = (incarnation_of(WorkerRecord("a", 0, number, ())) for number in (2**63 + 1, 2**63 + 2))
    assert first != second
    assert max(first, second) << COUNTER_BITS < 2**63


def test_each_new_reference_names_the_one_before_it_on_the_same_owner() -> None:
    me, owner, other = (WorkerRecord(name, number, 5, ()) for number, name in enumerate("abc"))
    ids = NewIds(me)
    (first, before), (_, elsewhere) = ids.new_rref(owner), ids.new_rref(other)
    assert (before, elsewhere) == (-1, -1)
    assert ids.new_fork() != first[:2]
    second, before = ids.new_rref(owner)
    assert before == first[1] & ((1 << COUNTER_BITS) - 1)
    ids.forget_rref(owner, second, before)
    assert ids.new_rref(owner)[1] == before
    ids.owner_lost(owner)
    assert ids.new_rref(owner)[1] == -1
