"""Regions of one block never overlap, and what came back is whole again."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from telegrad.wire.allocator import Allocator, rounded_size

SIZE = 256 * 1024


class ArenaMachine(RuleBasedStateMachine):
    """Any order of taking and giving back, held against a plain list of what is out."""

    def __init__(self) -> None:
        super().__init__()
        self.arena = Allocator(SIZE)
        self.out: dict[int, int] = {}

    @rule(size=st.integers(1, SIZE // 2))
    def take(self, size: int) -> None:
        offset = self.arena.allocate(size)
        needed = rounded_size(size)
        if offset is None:
            assert largest_gap(self.out) < needed
            return
        assert 0 <= offset <= SIZE - needed
        assert all(offset + needed <= other or other + length <= offset for other, length in self.out.items())
        self.out[offset] = needed

    @precondition(lambda self: self.out)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        offset = data.draw(st.sampled_from(sorted(self.out)))
        self.arena.free(offset)
        del self.out[offset]

    @invariant()
    def what_is_in_use_is_what_is_out(self) -> None:
        assert self.arena.in_use == sum(self.out.values()) <= SIZE

    def teardown(self) -> None:
        for offset in list(self.out):
            self.arena.free(offset)
        assert self.arena.in_use == 0
        assert self.arena.allocate(SIZE) == 0, "all that came back is one piece again"


def largest_gap(out: dict[int, int]) -> int:
    gaps, end = [], 0
    for offset in sorted(out):
        gaps.append(offset - end)
        end = offset + out[offset]
    return max([*gaps, SIZE - end])


TestArena = ArenaMachine.TestCase


@given(st.integers(1, 1 << 40))
def test_rounding_wastes_a_quarter_at_most_and_is_stable(size: int) -> None:
    taken = rounded_size(size)
    assert size <= taken
    assert taken - size <= max(4095, size // 4)
    assert rounded_size(taken) == taken


def test_what_was_not_taken_cannot_be_given_back() -> None:
    arena = Allocator(SIZE)
    offset = arena.allocate(1000)
    assert offset is not None
    arena.free(offset)
    with pytest.raises(KeyError):
        arena.free(offset)


def test_the_lowest_place_is_used_again_first() -> None:
    arena = Allocator(SIZE)
    first, second = arena.allocate(5000), arena.allocate(5000)
    assert first is not None
    assert second is not None
    arena.free(first)
    assert arena.allocate(5000) == first
