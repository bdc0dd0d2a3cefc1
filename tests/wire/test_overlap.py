"""Overlapping tensors of a message, and the root that they are views of."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from telegrad.wire import overlap
from telegrad.wire.descriptors import DETACHED, ROOT, UNRELATED, VIEW_OF_ROOT, extent_of
from telegrad.wire.overlap import overlapping, relations

SIZE = 60


def groups(*tensors: torch.Tensor) -> list[set[int]]:
    pieces = [
        (x.data_ptr(), x.data_ptr() + extent_of(x.shape, x.stride()) * x.itemsize, index)
        for index, x in enumerate(tensors)
    ]
    return [{index for _, _, index in group} for group in overlapping(pieces, dict(enumerate(tensors)))]


@st.composite
def strided_views(draw: st.DrawFn) -> tuple[list[int], list[int], int]:
    dimensions = draw(st.integers(0, 3))
    shape = draw(st.lists(st.integers(1, 3), min_size=dimensions, max_size=dimensions))
    stride = draw(st.lists(st.integers(0, 8), min_size=dimensions, max_size=dimensions))
    return shape, stride, draw(st.integers(0, SIZE - extent_of(shape, stride)))


@settings(deadline=None, max_examples=300)
@given(st.lists(strided_views(), min_size=1, max_size=4))
def test_tensors_overlap_exactly_if_they_share_elements(found: list[tuple[list[int], list[int], int]]) -> None:
    base, numbers = torch.zeros(SIZE), torch.arange(SIZE)
    elements = [set(numbers.as_strided(*place).flatten().tolist()) for place in found]
    shared = any(elements[i] & elements[j] for i in range(len(found)) for j in range(i))
    assert bool(groups(*[base.as_strided(*place) for place in found])) is shared


def test_elements_of_different_sizes_are_compared_by_bytes() -> None:
    x = torch.zeros(8)
    halves = x.view(torch.float16)
    assert groups(x[::2], halves[2:4]) == []
    assert groups(x[::2], halves[3:5]) == [{0, 1}]


def test_a_search_that_needs_too_much_memory_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.zeros(8)
    assert groups(x[::2], x[1::2]) == []
    monkeypatch.setattr(overlap, "_MAX_CELLS", 3)
    assert groups(x[::2], x[1::2]) == [{0, 1}]


def test_the_root_is_the_tensor_that_the_others_are_views_of() -> None:
    x = torch.ones(6, requires_grad=True) * 2
    assert relations([x[:2], x, x.detach()]) == [VIEW_OF_ROOT, ROOT, DETACHED]
    part = x[1:5]
    assert relations([part, x[2:3], part.view(2, 2)]) == [ROOT, VIEW_OF_ROOT, VIEW_OF_ROOT]


def test_there_is_no_root_without_a_base_that_covers_all_and_allows_in_place_changes() -> None:
    x = torch.ones(6, requires_grad=True) * 2
    assert relations([x[:4], x[2:]]) == [UNRELATED] * 2
    assert relations([x, x.detach().requires_grad_()]) == [UNRELATED] * 2
    assert relations([x, x.unbind()[0]]) == [UNRELATED] * 2
    assert relations([torch.ones(2), torch.ones(2)]) == [UNRELATED] * 2
    with torch.no_grad():
        view = x[:2]
    assert relations([x, view.requires_grad_()]) == [UNRELATED] * 2
    assert relations([x, x.detach().view(torch.int32)]) == [UNRELATED] * 2


def test_a_negated_view_has_no_root() -> None:
    x = torch.ones(2, requires_grad=True) * 2
    assert relations([x, torch._neg_view(x.detach())]) == [UNRELATED] * 2
