"""Which creating calls an owner still expects."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from telegrad.protocol.creations import Creations, creator_of
from telegrad.protocol.rref_ids import COUNTER_BITS

OWNER = 0


def test_the_creator_of_an_rref_is_a_worker_and_its_incarnation() -> None:
    assert creator_of((3, 7 << COUNTER_BITS | 42, 9)) == (3, 7)


def test_a_creation_is_pending_until_it_arrives() -> None:
    creations = Creations(OWNER, incarnation=0)
    assert creations.is_pending((1, 5, 0))
    creations.arrived((1, 5, 0), after=-1)
    assert not creations.is_pending((1, 5, 0))


def test_an_rref_that_the_creator_created_on_another_owner_is_not_pending() -> None:
    creations = Creations(OWNER, incarnation=0)
    creations.arrived((1, 5, 0), after=2)
    assert creations.is_pending((1, 2, 0)), "it was created here, and its call is in flight"
    assert [number for number in (3, 4) if creations.is_pending((1, number, 0))] == []


def test_nothing_is_pending_from_this_worker_or_for_another_incarnation_of_it() -> None:
    creations = Creations(OWNER, incarnation=8)
    assert not creations.is_pending((OWNER, 5, 8))
    assert not creations.is_pending((1, 5, 7))
    creations.arrived((1, 5, 7), after=-1)
    assert creations.is_pending((1, 5, 8)), "a call for a previous incarnation does not count"


def test_nothing_is_pending_from_a_lost_incarnation_but_from_the_next_one() -> None:
    creations = Creations(OWNER, incarnation=0)
    creations.creator_lost((1, 7))
    creations.arrived((1, 7 << COUNTER_BITS, 0), after=-1)
    assert not creations.is_pending((1, 7 << COUNTER_BITS | 1, 0))
    assert creations.is_pending((1, 8 << COUNTER_BITS, 0))


@given(st.lists(st.integers(0, 30), unique=True, min_size=1), st.randoms())
def test_exactly_the_calls_that_have_not_arrived_are_pending(numbers: list[int], random: object) -> None:
    creations, ordered = Creations(OWNER, incarnation=0), sorted(numbers)
    calls = list(zip(ordered, [-1, *ordered[:-1]], strict=True))
    random.shuffle(calls)  # type: ignore[attr-defined]  # hypothesis has no public type for it
    while calls:
        number, after = calls.pop()
        creations.arrived((1, number, 0), after)
        for waiting, _ in calls:
            assert creations.is_pending((1, waiting, 0))
        assert not creations.is_pending((1, number, 0))
    assert creations.gaps() == {(1, 0): 0}
