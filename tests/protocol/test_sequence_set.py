"""Numbers received in any order, compared with a plain set."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from telegrad.protocol.sequence_set import SequenceSet

Numbers = list[tuple[int, int]]
"""Each with its predecessor."""


def chain(numbers: list[int]) -> Numbers:
    ordered = sorted(numbers)
    return list(zip(ordered, [-1, *ordered], strict=False))


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(-1, 30))))
def test_it_agrees_with_a_plain_set(numbers: Numbers) -> None:
    received, known = SequenceSet(), set()
    for number, after in numbers:
        received.add(number, after)
        known |= {number, *range(after + 1, number)}
        assert [n for n in range(40) if not received.is_missing(n)] == sorted(known)


@given(st.sets(st.integers(0, 30), min_size=1).flatmap(lambda some: st.permutations(chain(list(some)))))
def test_there_are_no_gaps_when_all_numbers_were_received(numbers: Numbers) -> None:
    received = SequenceSet()
    for number, after in numbers:
        received.add(number, after)
    assert received.gaps() == 0


def test_a_wide_gap_takes_no_memory() -> None:
    received = SequenceSet()
    received.add(1 << 39, after=1 << 38)
    assert received.gaps() == 1
    assert received.is_missing(1 << 38)
