"""The fast path for contiguous tensors accepts only what the general path accepts."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from telegrad.errors import ProtocolError
from telegrad.wire import tensor_decode
from telegrad.wire.descriptors import BUFFER, CODES, DIRECT, QUANTIZED_CHANNELS, STRIDED, VIEW, TensorDescriptor
from telegrad.wire.tensor_decode import _decode_plain, _RegionDecoder, decode_tensors

ANY = st.builds(
    TensorDescriptor,
    form=st.sampled_from([STRIDED, STRIDED, STRIDED, VIEW, -1]),
    dtype=st.one_of(st.sampled_from(sorted(CODES.values())), st.integers(-2, 100)),
    offset=st.one_of(st.integers(0, 8).map(lambda n: 16 * n), st.integers(-20, 200)),
    shape=st.lists(st.one_of(st.integers(0, 6), st.integers(-1, 2**62)), max_size=3).map(tuple),
    stride=st.sampled_from([(), (), (), (1,)]),
    requires_grad=st.booleans(),
)


@given(st.lists(ANY, min_size=1, max_size=3), st.integers(0, 160), st.booleans())
def test_the_fast_path_returns_the_same_tensors_as_the_general_path(
    descriptors: list[TensorDescriptor], size: int, large: bool
) -> None:
    region = bytearray(range(size))
    with pytest.MonkeyPatch.context() as patch:
        if large:
            patch.setattr(tensor_decode, "LARGE_REGION", 15)
            patch.setattr(tensor_decode, "SMALL_ATTACHMENT", 24)
        found = _decode_plain(descriptors, region)
        if found is None:
            return
        decoder = _RegionDecoder(region, None)
        every = [decoder._decode(descriptor) for descriptor in descriptors]
    for tensor, expected in zip(found, every, strict=True):
        assert isinstance(tensor, torch.Tensor)
        assert isinstance(expected, torch.Tensor)
        assert (tensor.dtype, tensor.shape, tensor.stride()) == (expected.dtype, expected.shape, expected.stride())
        assert (tensor.requires_grad, tensor.is_leaf) == (expected.requires_grad, expected.is_leaf)
        assert bytes(tensor.untyped_storage()) == bytes(expected.untyped_storage())
        copied = large and size > 15 and tensor.nbytes < 24
        assert (tensor.data_ptr() == expected.data_ptr()) is not copied


def test_a_contiguous_tensor_takes_the_fast_path() -> None:
    descriptors = [TensorDescriptor(STRIDED, CODES[torch.float32], 0, (2, 2)), TensorDescriptor(STRIDED, 1, 16, (5,))]
    assert _decode_plain(descriptors, bytearray(32)) is not None


def test_small_tensors_in_a_large_region_are_copied_out_of_it() -> None:
    descriptor = TensorDescriptor(STRIDED, CODES[torch.float32], 0, (4,))
    region = bytearray(tensor_decode.LARGE_REGION + 16)
    found = _decode_plain([descriptor], region)
    assert found is not None
    assert isinstance(found[0], torch.Tensor)
    region[0] = 1
    assert found[0].tolist() == [0, 0, 0, 0]


def test_read_only_memory_does_not_take_the_fast_path() -> None:
    descriptor = TensorDescriptor(STRIDED, CODES[torch.float32], 0, (4,))
    assert _decode_plain([descriptor], memoryview(bytes(16))) is None


@pytest.mark.filterwarnings("ignore:.*[Qq]uantiz.*")
@pytest.mark.parametrize(("dtype", "part"), [(torch.complex64, 1), (torch.bool, 1), (torch.complex64, 2)])
def test_quantised_channels_with_scales_that_are_not_real_numbers_are_refused(dtype: torch.dtype, part: int) -> None:
    parts = [
        TensorDescriptor(STRIDED, CODES[torch.int8], 0, (2, 2)),
        TensorDescriptor(STRIDED, CODES[torch.float64], 16, (2,)),
        TensorDescriptor(STRIDED, CODES[torch.int64], 32, (2,)),
    ]
    parts[part] = TensorDescriptor(STRIDED, CODES[dtype], 16 * part, (2,))
    descriptor = TensorDescriptor(QUANTIZED_CHANNELS, CODES[torch.qint8], 0, (2, 2), parts=tuple(parts), detail=(0,))
    with pytest.raises(ProtocolError, match="not real numbers"):
        decode_tensors([descriptor], bytearray(64))


# -- handles of tensors that are on their device already --------------------------------------------------------------


class Handle:
    """A direct path with one tensor."""

    kind = "cpu"

    def share(self, x: torch.Tensor) -> bytes:
        raise NotImplementedError

    def open(self, handle: bytes) -> torch.Tensor:
        assert handle == b"0"
        return torch.ones(2)


def handle_of(shape: tuple[int, ...] = (2,), dtype: torch.dtype = torch.float32) -> TensorDescriptor:
    part = TensorDescriptor(BUFFER, 0, 0, (1,))
    return TensorDescriptor(DIRECT, CODES[dtype], 0, shape, parts=(part,))


def test_without_a_path_a_handle_is_an_error() -> None:
    with pytest.raises(ProtocolError, match="switched off here: set direct_devices on all workers or on none"):
        decode_tensors([handle_of()], bytearray(16))


def test_what_does_not_fit_its_handle_is_an_error() -> None:
    for descriptor, says in {
        handle_of((3,)): "another tensor than its handle has",
        handle_of((2,), torch.int64): "another tensor than its handle has",
        TensorDescriptor(DIRECT, CODES[torch.float32], 0, (2,)): "without a handle",
    }.items():
        with pytest.raises(ProtocolError, match=says):
            decode_tensors([descriptor], bytearray(b"0" + bytes(15)), Handle())
    (opened,) = decode_tensors([handle_of()], bytearray(b"0" + bytes(15)), Handle())
    assert isinstance(opened, torch.Tensor)
    assert opened.tolist() == [1, 1]
