"""The fast path for contiguous tensors gives the same result as the general path."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from telegrad.errors import PayloadError
from telegrad.wire import tensor_encode
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


def slowly(attachments: list[torch.Tensor]) -> RegionLayout:
    """Return the layout without the fast path."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensor_encode, "_describe_plain", lambda *_: False)
        return encode_tensors(attachments)


@given(st.lists(tensors(), min_size=1, max_size=4))
def test_both_paths_describe_and_write_the_same(attachments: list[torch.Tensor]) -> None:
    found = encode_tensors(attachments)
    expected = slowly(attachments)
    assert (found.descriptors, found.size) == (expected.descriptors, expected.size)
    assert written(found) == written(expected)
    assert found.copy() in (None, written(found))


def test_dense_tensors_are_copied_at_once_and_others_are_not() -> None:
    x = torch.arange(5.0)
    assert encode_tensors([x, x.double()]).copy() is not None
    assert encode_tensors([x.unfold(0, 2, 1)]).copy() is None
    with torch.device("cpu"):  # a mode of the thread, which would intercept the copy
        assert encode_tensors([x]).copy() is None


@pytest.mark.parametrize(
    "x",
    [
        torch.tensor(2.5).expand(3, 4),  # the gradient of a sum
        torch.arange(5.0).expand(4, 5),  # the gradient of a sum over the first dimension
        torch.arange(6).view(2, 3).expand(4, 1, 2, 3),
        torch.arange(5.0, requires_grad=True)[1:].expand(1, 3, 4),
        torch.tensor(True).expand(7),
    ],
)
def test_an_expanded_tensor_takes_the_fast_path_and_arrives_as_one_that_can_be_changed(x: torch.Tensor) -> None:
    described = RegionLayout()
    assert tensor_encode._describe_plain(described, [x], share=True)
    assert described.copy() == written(described) == written(slowly([x]))
    assert described.descriptors == slowly([x]).descriptors
    (got,) = decode_tensors(described.descriptors, bytearray(written(described)))
    assert isinstance(got, torch.Tensor)
    assert torch.equal(got, x)
    assert got.is_contiguous()
    got.detach().flatten()[0] = 0  # no other element changes
    assert torch.equal(got.flatten()[1:], x.flatten()[1:])


@pytest.mark.parametrize(
    "x",
    [
        torch.arange(5.0).view(5, 1).expand(5, 4),  # each element is repeated, which no repetition of bytes is
        torch.arange(10.0)[::2].expand(3, 5),
        torch.arange(6.0).view(2, 3).t(),
        torch.tensor(1.0).expand(1 << 16),  # torch copies it faster
    ],
)
def test_other_tensors_with_strides_do_not(x: torch.Tensor) -> None:
    assert not tensor_encode._describe_plain(RegionLayout(), [x], share=True)
    (got,) = decode_tensors(encode_tensors([x]).descriptors, bytearray(written(encode_tensors([x]))))
    assert isinstance(got, torch.Tensor)
    assert torch.equal(got, x)


def test_an_expanded_tensor_and_its_source_still_share_memory() -> None:
    x = torch.arange(4.0)
    described = encode_tensors([x, x.expand(3, 4)])
    first, second = decode_tensors(described.descriptors, bytearray(written(described)))
    assert isinstance(first, torch.Tensor)
    assert isinstance(second, torch.Tensor)
    first[0] = 9
    assert second[2, 0] == 9


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 6)), min_size=2, max_size=6), st.booleans())
def test_tensors_take_the_fast_path_unless_they_overlap(places: list[tuple[int, int]], share: bool) -> None:
    attachments = [BASE[first : first + size] for first, size in places]
    taken = [element for first, size in places for element in range(first, first + size)]
    apart = len(set(taken)) == len(taken)
    assert tensor_encode._describe_plain(RegionLayout(), attachments, share) is (apart or not share)


def test_a_contiguous_tensor_takes_the_fast_path() -> None:
    assert tensor_encode._describe_plain(
        RegionLayout(), [torch.ones(4, 1), torch.nn.Parameter(torch.ones(3))], share=True
    )


def test_overlapping_tensors_share_memory_unless_disabled() -> None:
    x = torch.ones(4)
    for share in (True, False):
        described = encode_tensors([x, x], share=share)
        first, second = decode_tensors(described.descriptors, bytearray(written(described)))
        assert torch.equal(first, second)
        assert (first.data_ptr() == second.data_ptr()) is share


@pytest.mark.parametrize("size", [1, 10_000])
def test_contents_of_any_size_are_written_completely(size: int) -> None:
    x, y = torch.rand(size), torch.rand(3)
    described = encode_tensors([x, y])
    region = written(described)
    assert region[: 4 * size] == x.numpy().tobytes()
    assert region[described.descriptors[1].offset :][:12] == y.numpy().tobytes()


def test_a_storage_that_is_freed_before_the_copy_is_noticed() -> None:
    x = torch.ones(8)
    described = encode_tensors([x])
    x.untyped_storage().resize_(0)
    with pytest.raises(PayloadError, match="freed"):
        described.copy()


def test_a_sparse_meta_tensor_is_refused() -> None:
    with pytest.raises(PayloadError, match=r"a meta tensor of layout torch\.sparse_coo"):
        encode_tensors([torch.empty((2, 2), layout=torch.sparse_coo, device="meta")])


@pytest.mark.filterwarnings("ignore:.*[Qq]uantiz.*")
def test_a_quantised_tensor_with_floating_point_zero_points_is_refused() -> None:
    x = torch.quantize_per_channel(torch.ones(2, 2), torch.ones(2), torch.zeros(2), 0, torch.quint8)
    with pytest.raises(PayloadError, match="per_channel_affine_float_qparams"):
        encode_tensors([x])


def test_unaligned_memory_from_outside_torch_is_sent_without_sharing() -> None:
    memory = bytearray(range(41))
    whole = torch.frombuffer(memory, dtype=torch.float32, count=10, offset=1)
    described = encode_tensors([whole, whole[:4]])
    restored = decode_tensors(described.descriptors, bytearray(written(described)))
    for found, expected in zip(restored, (whole, whole[:4]), strict=True):
        assert isinstance(found, torch.Tensor)
        assert found.numpy().tobytes() == expected.numpy().tobytes()
    assert restored[0].data_ptr() != restored[1].data_ptr()  # type: ignore[union-attr]  # tensors


def test_a_tensor_whose_memory_cannot_be_accessed_is_refused() -> None:
    x = torch.ones(3)
    torch._C._set_throw_on_mutable_data_ptr(x)  # as torch does for tensors with fake storage
    with pytest.raises(PayloadError, match="no memory of its own"):
        encode_tensors([x])
