"""Numbers that come in any order, against a set."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from telegrad.protocol.arrivals import Arrivals


@given(st.lists(st.integers(0, 30)))
def test_it_knows_what_has_come_as_a_set_would(numbers: list[int]) -> None:
    arrivals, came = Arrivals(), set()
    for number in numbers:
        arrivals.came(number)
        came.add(number)
        assert [n for n in range(40) if not arrivals.to_come(n)] == sorted(came)


@given(st.permutations(list(range(12))))
def test_when_all_have_come_nothing_is_kept_of_their_order(numbers: list[int]) -> None:
    arrivals = Arrivals()
    for number in numbers:
        arrivals.came(number)
    assert arrivals.gaps() == 0


def test_a_number_from_far_away_takes_no_memory() -> None:
    arrivals = Arrivals()
    arrivals.came(1 << 39)
    assert arrivals.gaps() == 1
    assert arrivals.to_come(1 << 38)
