from __future__ import annotations

from typing import Any

import pytest

from telegrad.errors import PayloadError, ProtocolError
from telegrad.protocol.ownership import Ownership
from telegrad.protocol.rref_ids import COUNTER_BITS
from telegrad.rref.authorization import check_creation, check_received, check_sent, is_permitted
from telegrad.wire.messages import (
    Creation,
    ForkInfo,
    RRefChildAccept,
    RRefForkAccept,
    RRefForkRequest,
    RRefUserDelete,
)

ME, FRIEND, MALLORY = 0, 1, 2
VALUE = (ME, 5, 9)
FORK = (ME, 6)


@pytest.fixture
def rules() -> Ownership:
    """Return the rules of a worker that owns a value, and has sent it to its friend."""
    rules = Ownership(ME, incarnation=9)
    rules.own(VALUE)
    rules.prepare_fork(VALUE, None, to=FRIEND, fork=FORK)
    return rules


def id_of(worker: int, incarnation: int, counter: int) -> tuple[int, int, int]:
    return worker, incarnation << COUNTER_BITS | counter, 9


def test_only_the_holder_may_delete_a_fork(rules: Ownership) -> None:
    assert is_permitted(rules, FRIEND, RRefUserDelete(VALUE, FORK))
    assert not is_permitted(rules, MALLORY, RRefUserDelete(VALUE, FORK))
    assert not is_permitted(rules, FRIEND, RRefUserDelete(VALUE, (ME, 7)))


def test_a_creator_may_delete_before_the_value_exists_and_nobody_else(rules: Ownership) -> None:
    early = id_of(FRIEND, 3, 1)
    assert is_permitted(rules, FRIEND, RRefUserDelete(early, (FRIEND, 2)))
    assert not is_permitted(rules, MALLORY, RRefUserDelete(early, (FRIEND, 2)))
    assert not is_permitted(rules, FRIEND, RRefUserDelete(early, (MALLORY, 2)))


def test_only_the_owner_confirms_a_fork_and_only_the_receiver_its_copy() -> None:
    rules = Ownership(ME)
    rules.start_creation((ME, 1, 0), (ME, 2), FRIEND)
    rules.prepare_fork((ME, 1, 0), (ME, 2), to=FRIEND, fork=(ME, 3))
    assert is_permitted(rules, FRIEND, RRefForkAccept((ME, 2), False))
    assert not is_permitted(rules, MALLORY, RRefForkAccept((ME, 2), False))
    assert not is_permitted(rules, FRIEND, RRefForkAccept((ME, 9), False))
    assert is_permitted(rules, FRIEND, RRefChildAccept((ME, 3)))
    assert not is_permitted(rules, MALLORY, RRefChildAccept((ME, 3)))
    assert not is_permitted(rules, FRIEND, RRefChildAccept((ME, 9)))


def test_nobody_may_ask_for_a_fork_that_the_owner_did_not_send(rules: Ownership) -> None:
    for sender in (FRIEND, MALLORY):
        assert not is_permitted(rules, sender, RRefForkRequest(VALUE, (sender, 8)))


def test_a_reference_is_sent_to_or_by_its_owner_only() -> None:
    check_sent(ME, ME, MALLORY, "it")
    check_sent(FRIEND, ME, FRIEND, "it")
    with pytest.raises(PayloadError, match="only to or by the worker that owns"):
        check_sent(FRIEND, ME, MALLORY, "it")


@pytest.mark.parametrize(
    ("sender", "fork"),
    [
        (MALLORY, ForkInfo(0, VALUE, (MALLORY, 1), ME)),
        (MALLORY, ForkInfo(0, VALUE, FORK, ME)),
        (MALLORY, ForkInfo(0, id_of(FRIEND, 3, 4), (MALLORY, 1), ME)),
        (MALLORY, ForkInfo(0, id_of(FRIEND, 3, 4), (MALLORY, 1), FRIEND)),
        (MALLORY, ForkInfo(0, id_of(MALLORY, 3, 4), (FRIEND, 1), MALLORY)),
        (FRIEND, ForkInfo(0, id_of(FRIEND, 3, 4), (FRIEND, 1), FRIEND)),  # the fork of another reference
    ],
)
def test_a_reference_of_another_worker_is_refused(rules: Ownership, sender: int, fork: Any) -> None:
    rules.start_creation((ME, 1, 0), (FRIEND, 1), FRIEND)
    with pytest.raises(ProtocolError, match="does not hold"):
        check_received(rules, ME, sender, fork)


def test_references_of_their_holders_and_owners_are_taken(rules: Ownership) -> None:
    check_received(rules, ME, FRIEND, ForkInfo(0, VALUE, (FRIEND, 1), ME))
    check_received(rules, ME, FRIEND, ForkInfo(0, id_of(FRIEND, 3, 4), (FRIEND, 1), FRIEND))
    check_received(rules, ME, FRIEND, ForkInfo(0, id_of(FRIEND, 3, 4), (FRIEND, 1), ME))  # it is about to create it
    check_received(rules, ME, ME, ForkInfo(0, VALUE, (ME, 1), ME))


@pytest.mark.parametrize(
    ("caller", "rref", "fork"),
    [
        (FRIEND, id_of(FRIEND, 3, 4), (MALLORY, 1)),
        (FRIEND, VALUE, (FRIEND, 1)),
        (FRIEND, (FRIEND, 3 << COUNTER_BITS, 8), (FRIEND, 1)),
    ],
)
def test_a_value_is_created_under_a_new_id_and_for_its_creator_only(
    rules: Ownership, caller: int, rref: Any, fork: Any
) -> None:
    with pytest.raises(ProtocolError, match="was used before"):
        check_creation(rules, caller, Creation(rref, fork))


def test_an_id_is_used_once(rules: Ownership) -> None:
    creation = Creation(id_of(FRIEND, 3, 4), (FRIEND, 1))
    check_creation(rules, FRIEND, creation)
    rules.creation_received(creation.rref, creation.fork, FRIEND)
    with pytest.raises(ProtocolError, match="was used before"):
        check_creation(rules, FRIEND, creation)
