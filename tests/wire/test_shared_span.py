"""Overlapping tensors from a peer are restored in one span, or refused if they contradict each other."""

from __future__ import annotations

import msgspec
import pytest
import torch

from telegrad.errors import ProtocolError
from telegrad.wire.descriptors import CODES, DETACHED, ROOT, UNRELATED, VIEW, VIEW_OF_ROOT, TensorDescriptor
from telegrad.wire.tensors import decode_tensors

SINGLE, SPAN = CODES[torch.float32], 64


def view(
    relation: int,
    first: int = 0,
    count: int = 4,
    dtype: int = SINGLE,
    interpretation: int = 0,
    stride: tuple[int, ...] = (1,),
    nbytes: int = SPAN,
    requires_grad: bool = False,
) -> TensorDescriptor:
    detail = (nbytes, first, relation, interpretation)
    return TensorDescriptor(VIEW, dtype, 0, (count,), stride, requires_grad, detail=detail)


def test_views_of_a_root_share_its_memory_and_history() -> None:
    root, part, detached = decode_tensors(
        [view(ROOT, count=16, requires_grad=True), view(VIEW_OF_ROOT, 4), view(DETACHED, 4)], bytearray(SPAN)
    )
    assert isinstance(root, torch.Tensor)
    assert isinstance(part, torch.Tensor)
    assert isinstance(detached, torch.Tensor)
    assert part._base is root
    assert part.data_ptr() == detached.data_ptr() == root.data_ptr() + 16
    with torch.no_grad():
        part.fill_(1)
    assert root.tolist() == [0] * 4 + [1] * 4 + [0] * 8


@pytest.mark.parametrize(
    ("views", "message"),
    [
        ([view(ROOT), view(ROOT)], "two root tensors"),
        ([view(9)], "unknown relation"),
        ([view(VIEW_OF_ROOT)], "a view without its base"),
        ([view(ROOT), view(VIEW_OF_ROOT, dtype=CODES[torch.int32])], "a view without its base"),
        ([view(ROOT, 4), view(VIEW_OF_ROOT, 0)], "reaches beyond its base"),
        ([view(ROOT, 0), view(DETACHED, 4)], "reaches beyond its base"),
        ([view(UNRELATED, 13)], "beyond its span"),
        ([view(UNRELATED, -1)], "beyond its span"),
        ([view(UNRELATED, count=0)], "beyond its span"),
        ([view(UNRELATED, nbytes=24)], "beyond its span"),
        ([view(UNRELATED, stride=())], "without strides"),
        ([view(UNRELATED, interpretation=4)], "cannot be read"),
        ([view(UNRELATED, interpretation=1)], "cannot be read"),
        ([view(ROOT, interpretation=2)], "cannot be read"),
    ],
)
def test_contradictory_views_are_refused(views: list[TensorDescriptor], message: str) -> None:
    with pytest.raises(ProtocolError, match=message):
        decode_tensors(views, bytearray(SPAN))


def test_overlapping_tensors_are_on_one_device() -> None:
    elsewhere = msgspec.structs.replace(view(UNRELATED, first=2), device="cuda:0")
    with pytest.raises(ProtocolError, match="overlapping tensors on two devices"):
        decode_tensors([view(UNRELATED), elsewhere], bytearray(SPAN))
