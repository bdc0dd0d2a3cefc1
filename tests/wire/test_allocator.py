"""Allocated regions never overlap, and freed regions are merged."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from telegrad.wire.allocator import Allocator, rounded_size

SIZE = 256 * 1024


class AllocatorMachine(RuleBasedStateMachine):
    """Any order of allocating and freeing, compared with a plain table."""

    def __init__(self) -> None:
        super().__init__()
        self.allocator = Allocator(SIZE)
        self.allocated: dict[int, int] = {}

    @rule(size=st.integers(1, SIZE // 2))
    def allocate(self, size: int) -> None:
        offset = self.allocator.allocate(size)
        needed = rounded_size(size)
        if offset is None:
            assert largest_gap(self.allocated) < needed
            return
        assert 0 <= offset <= SIZE - needed
        assert all(offset + needed <= other or other + length <= offset for other, length in self.allocated.items())
        self.allocated[offset] = needed

    @precondition(lambda self: self.allocated)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        offset = data.draw(st.sampled_from(sorted(self.allocated)))
        self.allocator.free(offset)
        del self.allocated[offset]

    @invariant()
    def bytes_in_use_are_the_sum_of_all_regions(self) -> None:
        assert self.allocator.in_use == sum(self.allocated.values()) <= SIZE

    def teardown(self) -> None:
        for offset in list(self.allocated):
            self.allocator.free(offset)
        assert self.allocator.in_use == 0
        assert self.allocator.allocate(SIZE) == 0, "all regions must be merged again"


def largest_gap(allocated: dict[int, int]) -> int:
    gaps, end = [], 0
    for offset in sorted(allocated):
        gaps.append(offset - end)
        end = offset + allocated[offset]
    return max([*gaps, SIZE - end])


TestAllocator = AllocatorMachine.TestCase


@given(st.integers(1, 1 << 40))
def test_rounding_wastes_at_most_a_quarter_and_is_stable(size: int) -> None:
    rounded = rounded_size(size)
    assert size <= rounded
    assert rounded - size <= max(4095, size // 4)
    assert rounded_size(rounded) == rounded


def test_freeing_twice_raises() -> None:
    allocator = Allocator(SIZE)
    offset = allocator.allocate(1000)
    assert offset is not None
    allocator.free(offset)
    with pytest.raises(KeyError):
        allocator.free(offset)


def test_the_lowest_offset_is_reused_first() -> None:
    allocator = Allocator(SIZE)
    first, second = allocator.allocate(5000), allocator.allocate(5000)
    assert first is not None
    assert second is not None
    allocator.free(first)
    assert allocator.allocate(5000) == first
