"""Which tensors of a message have elements in common, and which of them the others are views of."""

from __future__ import annotations

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
def places(draw: st.DrawFn) -> tuple[list[int], list[int], int]:
    dimensions = draw(st.integers(0, 3))
    shape = draw(st.lists(st.integers(1, 3), min_size=dimensions, max_size=dimensions))
    stride = draw(st.lists(st.integers(0, 8), min_size=dimensions, max_size=dimensions))
    return shape, stride, draw(st.integers(0, SIZE - extent_of(shape, stride)))


@settings(deadline=None, max_examples=300)
@given(st.lists(places(), min_size=1, max_size=4))
def test_overlap_is_found_exactly_where_elements_are_shared(found: list[tuple[list[int], list[int], int]]) -> None:
    base, numbers = torch.zeros(SIZE), torch.arange(SIZE)
    elements = [set(numbers.as_strided(*place).flatten().tolist()) for place in found]
    shared = any(elements[i] & elements[j] for i in range(len(found)) for j in range(i))
    assert bool(groups(*[base.as_strided(*place) for place in found])) is shared


def test_elements_of_several_sizes_are_compared_by_their_bytes() -> None:
    x = torch.zeros(8)
    halves = x.view(torch.float16)
    assert groups(x[::2], halves[2:4]) == []
    assert groups(x[::2], halves[3:5]) == [{0, 1}]


def test_a_search_that_would_take_much_memory_is_not_made(monkeypatch: object) -> None:
    x = torch.zeros(8)
    assert groups(x[::2], x[1::2]) == []
    monkeypatch.setattr(overlap, "_MAX_CELLS", 3)  # type: ignore[attr-defined]  # pytest's
    assert groups(x[::2], x[1::2]) == [{0, 1}]


def test_the_root_is_the_one_that_others_are_views_of() -> None:
    x = torch.ones(6, requires_grad=True) * 2
    assert relations([x[:2], x, x.detach()]) == [VIEW_OF_ROOT, ROOT, DETACHED]
    part = x[1:5]
    assert relations([part, x[2:3], part.view(2, 2)]) == [ROOT, VIEW_OF_ROOT, VIEW_OF_ROOT]


def test_there_is_no_root_where_none_covers_the_others_or_torch_would_not_record_changes() -> None:
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
