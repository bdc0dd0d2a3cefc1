"""The limits of plain data: which keys could be expensive to compare, and how expensive."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from telegrad.wire.plain_format import LARGEST, SMALLEST, compared_elements, composite_count, is_atom

simple = st.none() | st.booleans() | st.integers(SMALLEST, LARGEST) | st.floats() | st.text() | st.binary()


@given(st.lists(simple))
def test_keys_of_simple_types_cost_nothing(keys: list[object]) -> None:
    assert composite_count(keys) == 0
    assert compared_elements(keys) == 0


@given(st.lists(st.tuples(simple, simple), min_size=2, max_size=20))
def test_tuples_cost_more_the_more_there_are_and_the_longer_they_are(keys: list[tuple[object, ...]]) -> None:
    assert composite_count(keys) == len(keys)
    cost = compared_elements(keys)
    assert cost >= (len(keys) - 1) * len(keys) * 3  # each pair compares two elements and itself
    assert compared_elements([*keys, keys[0]]) > cost
    assert compared_elements([(*key, 1) for key in keys]) > cost


def test_a_single_composite_key_is_compared_with_nothing() -> None:
    assert compared_elements([(1, 2)]) == compared_elements([1, (1, 2)]) == 0


def test_long_keys_count_by_their_length() -> None:
    short, long = ("x", 1), ("x" * 6400, 1 << 51_200)
    assert compared_elements([long, long]) >= compared_elements([short, short]) + 2 * (100 + 100)


def test_frozensets_and_integers_of_more_than_64_bits_are_composite() -> None:
    assert composite_count([frozenset({1}), LARGEST + 1, SMALLEST - 1, LARGEST, SMALLEST]) == 3
    assert is_atom(LARGEST)
    assert not is_atom(LARGEST + 1)
    assert not is_atom(SMALLEST - 1)
