"""Reference ids in messages and error texts."""

from __future__ import annotations

from telegrad.connection.worker_record import WorkerRecord
from telegrad.protocol.rref_ids import COUNTER_BITS
from telegrad.rref.ids import describe, incarnation_of


def test_error_texts_show_creator_and_counter_of_a_reference() -> None:
    assert describe((3, 5 << COUNTER_BITS | 7, 9)) == "reference 3:7"


def test_incarnations_fit_into_an_id_and_differ_between_restarts() -> None:
    first, second = (incarnation_of(WorkerRecord("a", 0, number, ())) for number in (2**63 + 1, 2**63 + 2))
    assert first != second
    assert max(first, second) << COUNTER_BITS < 2**63
