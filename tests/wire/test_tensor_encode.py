"""The short way for contiguous tensors describes and writes what the long way would."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from telegrad.wire import tensor_encode as layout
from telegrad.wire.tensor_decode import decode_tensors
from telegrad.wire.tensor_encode import RegionLayout, encode_tensors

DTYPES = [torch.float32, torch.float64, torch.int64, torch.bool, torch.bfloat16, torch.complex64, torch.uint8]
BASE = torch.arange(512.0)


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    shape = draw(st.lists(st.integers(0, 4), max_size=4))
    x = torch.arange(float(torch.Size(shape).numel())).reshape(shape).to(draw(st.sampled_from(DTYPES)))
    how = draw(st.integers(0, 6))
    if how == 0 and x.dim() > 1:
        x = x.transpose(0, 1)
    elif how == 1 and x.is_complex():
        x = x.conj()
    elif how == 2 and x.is_floating_point():
        x = x.requires_grad_()
    elif how == 3:
        x = BASE[draw(st.integers(0, 9)) : 400]
    elif how == 4 and x.is_floating_point():
        x = torch.nn.Parameter(x)
    elif how == 5 and x.dim():
        x = x[..., ::2]
    return x


def written(described: RegionLayout) -> bytes:
    region = bytearray(described.size)
    described.write(region)
    return bytes(region)


@given(st.lists(tensors(), min_size=1, max_size=4))
def test_both_ways_describe_and_write_the_same(attachments: list[torch.Tensor]) -> None:
    found = encode_tensors(attachments)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layout, "_describe_plain", lambda *_: False)
        expected = encode_tensors(attachments)
    assert (found.descriptors, found.size) == (expected.descriptors, expected.size)
    assert written(found) == written(expected)
    assert found.copy() in (None, written(found))


def test_dense_tensors_are_copied_at_once_and_others_are_not() -> None:
    x = torch.arange(5.0)
    assert encode_tensors([x, x.double()]).copy() is not None
    assert encode_tensors([x.expand(2, 5)]).copy() is None
    with torch.device("cpu"):  # a mode of the thread's, which would see what is done here
        assert encode_tensors([x]).copy() is None


def test_an_ordinary_tensor_takes_the_short_way() -> None:
    assert layout._describe_plain(RegionLayout(), [torch.ones(4, 1), torch.nn.Parameter(torch.ones(3))], share=True)


def test_what_shares_memory_does_so_on_arrival_unless_that_is_not_wanted() -> None:
    x = torch.ones(4)
    for share in (True, False):
        described = encode_tensors([x, x], share=share)
        first, second = decode_tensors(described.descriptors, bytearray(written(described)))
        assert torch.equal(first, second)
        assert (first.data_ptr() == second.data_ptr()) is share


@pytest.mark.parametrize("size", [1, 10_000])
def test_contents_are_written_whole_whatever_their_size(size: int) -> None:
    x, y = torch.rand(size), torch.rand(3)
    described = encode_tensors([x, y])
    region = written(described)
    assert region[: 4 * size] == x.numpy().tobytes()
    assert region[described.descriptors[1].offset :][:12] == y.numpy().tobytes()
