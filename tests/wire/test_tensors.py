"""Tensors round-trip, share memory only if they overlap, and no descriptor can reach beyond its region."""

from __future__ import annotations

import gc
import pickle
import weakref
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from telegrad.errors import LimitExceeded, PayloadError, ProtocolError
from telegrad.wire import descriptors as forms
from telegrad.wire.tensors import TensorDescriptor, decode_tensors, encode_tensors
from telegrad.wire.torch_state import has_default_torch_state

DTYPES = sorted({d for d in vars(torch).values() if isinstance(d, torch.dtype)}, key=str)
QUANTISED = [torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4]
PLAIN_DTYPES = [d for d in DTYPES if d not in QUANTISED]

pytestmark = pytest.mark.filterwarnings(
    "ignore:ComplexHalf:UserWarning",
    "ignore:The PyTorch API of nested tensors:UserWarning",
    "ignore:Sparse:UserWarning",  # torch announces that some sparse layouts are in beta
    "ignore:.*[Qq]uantiz.*",  # and that its quantised tensors are on their way out
)


def sent(attachments: Sequence[Any], **options: Any) -> list[Any]:
    """Encode and decode attachments, with their descriptors as a frame carries them."""
    layout = encode_tensors(attachments)
    region = bytearray(layout.size)
    layout.write(region)
    head = msgspec.msgpack.encode(layout.descriptors)
    return list(decode_tensors(msgspec.msgpack.decode(head, type=tuple[TensorDescriptor, ...]), region, **options))


def sample(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    count = int(torch.Size(shape).numel())
    values = torch.arange(count * dtype.itemsize) * 37 % (2 if dtype is torch.bool else 251)
    return values.to(torch.uint8).view(dtype).reshape(shape) if count else torch.empty(shape, dtype=dtype)


def contents(x: torch.Tensor) -> list[int]:
    """The elements in logical order, as bytes, for dtypes that cannot be compared and for NaN."""
    if x.dtype.itemsize == 1:
        return [int(b) for b in x.view(torch.uint8).contiguous().flatten()]
    return x.resolve_conj().resolve_neg().contiguous().flatten().view(torch.uint8).tolist()


@pytest.mark.parametrize("dtype", PLAIN_DTYPES, ids=str)
def test_every_dtype_round_trips_bit_for_bit(dtype: torch.dtype) -> None:
    x = sample(dtype, 4, 6)
    dense, transposed, gaps = (sent([view])[0] for view in (x, x.t(), x[:, ::2]))
    for original, received in ((x, dense), (x.t(), transposed), (x[:, ::2], gaps)):
        assert received.dtype is dtype
        assert received.shape == original.shape
        assert contents(received) == contents(original)


@pytest.mark.parametrize("dtype", [torch.qint8, torch.quint8, torch.qint32], ids=str)
def test_quantised_tensors_keep_their_parameters(dtype: torch.dtype) -> None:
    whole = torch.quantize_per_tensor(torch.linspace(0, 3, 6).reshape(2, 3), 0.25, 1, dtype)
    scales, zero_points = torch.tensor([0.25, 0.5]), torch.tensor([0, 1])
    channels = torch.quantize_per_channel(torch.linspace(0, 3, 6).reshape(2, 3), scales, zero_points, 0, dtype)
    a, b = sent([whole, channels])
    assert (a.dtype, a.q_scale(), a.q_zero_point()) == (dtype, 0.25, 1)
    assert torch.equal(a.int_repr(), whole.int_repr())
    assert torch.equal(b.int_repr(), channels.int_repr())
    assert b.q_per_channel_scales().tolist() == [0.25, 0.5]
    assert b.q_per_channel_axis() == 0


def test_an_unsupported_dtype_is_refused_by_name() -> None:
    with pytest.raises(PayloadError, match=r"torch\.quint4x2"):
        encode_tensors([torch.empty(4, dtype=torch.quint4x2)])


@st.composite
def views(draw: st.DrawFn) -> torch.Tensor:
    dtype = draw(
        st.sampled_from([torch.float32, torch.int64, torch.bool, torch.bfloat16, torch.complex64, torch.uint16])
    )
    shape = draw(st.lists(st.integers(0, 4), max_size=4))
    x = torch.arange(int(torch.Size(shape).numel())).to(dtype).reshape(shape)
    for _ in range(draw(st.integers(0, 4))):
        step = draw(st.sampled_from(["transpose", "slice", "expand", "select", "unsqueeze", "conj"]))
        if step == "transpose" and x.dim() > 1:
            x = x.transpose(draw(st.integers(0, x.dim() - 1)), draw(st.integers(0, x.dim() - 1)))
        elif step == "slice" and x.dim():
            dim = draw(st.integers(0, x.dim() - 1))
            start, by = draw(st.integers(0, 3)), draw(st.integers(1, 3))
            x = x[(slice(None),) * dim + (slice(start, None, by),)]
        elif step == "expand":
            x = x.expand(2, *x.shape)
        elif step == "select" and x.dim() and x.shape[0]:
            x = x[-1]
        elif step == "unsqueeze":
            x = x.unsqueeze(draw(st.integers(0, x.dim())))
        elif step == "conj":
            x = x.conj()
    return x


@settings(deadline=None, max_examples=200)
@given(st.lists(views(), max_size=4))
def test_any_views_round_trip(originals: list[torch.Tensor]) -> None:
    layout = encode_tensors(originals)
    assert all(d.offset % 16 == 0 for d in layout.descriptors)
    received = sent(originals)
    assert len(received) == len(originals)
    for original, tensor in zip(originals, received, strict=True):
        assert tensor.dtype is original.dtype
        assert tensor.shape == original.shape
        assert torch.equal(tensor, original)
        assert tensor.is_leaf


@pytest.mark.parametrize(
    "x",
    [
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.randn(2, 1, 4, 5).to(memory_format=torch.channels_last),
        torch.randn(3, 5).t(),
        torch.randn(2, 3, 4).permute(2, 0, 1),
        torch.empty_strided((0, 3), (7, 2)),
        torch.empty_strided((1, 3), (9, 1)),
        torch.randn(4).conj(),
        torch.randn(3, 2, dtype=torch.complex64).t().conj(),
    ],
    ids=lambda x: f"{tuple(x.shape)}-{x.stride()}",
)
def test_a_dense_tensor_keeps_its_strides(x: torch.Tensor) -> None:
    (y,) = sent([x])
    assert y.stride() == x.stride()
    assert not y._is_view()
    if x.numel() and not x.is_floating_point():
        assert torch.equal(y, x)


def test_only_the_elements_of_a_view_are_sent() -> None:
    base = torch.randn(1000, 1000)
    assert encode_tensors([base[5, 10:20]]).size == 48
    assert encode_tensors([base[:4, 7]]).size == 16
    assert encode_tensors([torch.randn(1).expand(100)]).size == 400
    (y,) = sent([base[:4, 7]])
    assert y.is_contiguous()
    assert torch.equal(y, base[:4, 7])


def test_conjugated_and_negated_views_are_resolved() -> None:
    x = torch.randn(3, dtype=torch.complex128)
    (conjugated,), (negated,) = sent([x.conj()]), sent([x.conj().imag])
    assert not conjugated.is_conj()
    assert not negated.is_neg()
    assert torch.equal(conjugated, x.conj())
    assert torch.equal(negated, -x.imag)


def test_a_zero_tensor_without_memory_is_received_as_zeros() -> None:
    (y,) = sent([torch._efficientzerotensor(3)])
    assert y.tolist() == [0, 0, 0]
    assert not y._is_zerotensor()


def test_leaves_keep_requires_grad() -> None:
    leaf = torch.randn(3, requires_grad=True)
    received = sent([leaf, leaf * 2, leaf.detach(), torch.nn.Parameter(torch.ones(2)), leaf[::2]])
    assert [t.requires_grad for t in received] == [True, True, False, True, True]
    assert all(t.is_leaf for t in received)
    assert torch.equal(received[1], (leaf * 2).detach())


def test_writing_takes_a_snapshot() -> None:
    x, gaps = torch.zeros(4), torch.zeros(4, 4)[:, ::2]
    layout = encode_tensors([x, gaps])
    region = bytearray(layout.size)
    layout.write(region)
    x.fill_(1), gaps.fill_(1)
    assert all(not t.any() for t in decode_tensors(layout.descriptors, region))


# ---- sharing


def shares_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    before = b.clone()
    a.add_(1)
    return not torch.equal(before, b)


def test_overlapping_views_share_memory_on_the_receiver() -> None:
    x = torch.arange(12.0).reshape(3, 4)
    a, row, column, same = sent([x, x[1], x[:, 2], x.detach()])
    assert torch.equal(a, x)
    assert torch.equal(row, x[1])
    assert torch.equal(column, x[:, 2])
    assert encode_tensors([x, x[1], x[:, 2], x.detach()]).size == 48
    assert all(shares_memory(a, other) for other in (row, column, same))
    assert shares_memory(row, a)


def test_overlapping_views_share_a_version_counter() -> None:
    x = torch.ones(4)
    a, half = sent([x, x[:2]])
    w = torch.ones(4, requires_grad=True)
    y = (a * w).sum()
    half.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


def test_autograd_works_in_place_on_shared_views() -> None:
    x = torch.ones(4)
    a, half = sent([x, x[:2]])
    w = torch.tensor(3.0, requires_grad=True)
    half.mul_(w)
    a.sum().backward()
    assert w.grad is not None
    assert w.grad.item() == 2


def test_views_of_several_dtypes_share_one_storage() -> None:
    x = torch.ones(4)
    a, bits = sent([x, x.view(torch.int32)])
    bits.zero_()
    assert not a.any()


def test_shared_views_need_not_start_at_the_beginning_of_the_storage() -> None:
    x = torch.arange(100.0)
    first, second = sent([x[51:60], x[55:70]])
    assert first.tolist() == x[51:60].tolist()
    assert second.tolist() == x[55:70].tolist()
    assert shares_memory(first, second)


@pytest.mark.parametrize("requires_grad", [False, True])
def test_tensors_that_overlap_share_memory_whether_they_require_grad_or_not(requires_grad: bool) -> None:
    x = torch.ones(4, requires_grad=requires_grad)
    a, b, c = sent([x, x.detach(), x[:2]])
    assert [t.requires_grad for t in (a, b, c)] == [requires_grad, False, requires_grad]
    assert all(t.is_leaf for t in (a, b, c))
    assert shares_memory(b, a)
    assert shares_memory(b, c)


def test_memory_from_outside_torch_is_compared_by_address() -> None:
    array = np.arange(5.0)
    a, b = sent([torch.from_numpy(array), torch.from_numpy(array[1:3])])
    assert b.tolist() == [1, 2]
    assert shares_memory(a, b)


def test_a_tensor_and_its_conjugate_share_memory() -> None:
    x = torch.complex(torch.ones(3), torch.ones(3))
    a, conjugate, negated = sent([x, x.conj(), x.conj().imag])
    a.mul_(2)
    assert conjugate.tolist() == [2 - 2j] * 3
    assert negated.tolist() == [-2] * 3


def test_views_of_several_dtypes_have_one_version_counter() -> None:
    x = torch.ones(4)
    a, bits, halves = sent([x, x.view(torch.int32), x.view(torch.float16)])
    bits.zero_()
    assert a._version == halves._version == 1


def test_an_in_place_change_of_a_real_view_of_a_complex_tensor_is_recorded() -> None:
    x = torch.complex(torch.ones(3), torch.ones(3))
    for order in (1, -1):
        a, parts = sent([x, torch.view_as_real(x)][::order])[::order]
        w = torch.tensor([2.0, 3.0], requires_grad=True)
        parts.mul_(w)
        a.real.sum().backward()
        assert w.grad is not None
        assert w.grad.tolist() == [3, 0]


def test_only_tensors_with_common_elements_share_memory() -> None:
    x = torch.arange(12.0).reshape(3, 4)
    assert encode_tensors([x[:, 0], x[:, 1]]).size == 32
    assert encode_tensors(list(x.chunk(2, 1))).size == 64
    assert encode_tensors([x[0], x[1]]).size == 32
    column, row = sent([x[:, 1], x[2]])
    row.fill_(7)
    assert column.tolist() == [1, 5, 7]


def test_views_that_are_far_apart_are_sent_separately() -> None:
    x = torch.arange(1000.0)
    assert encode_tensors([x[:4], x[-4:]]).size == 32
    a, b = sent([x[:4], x[-4:]])
    assert a.tolist() == [0, 1, 2, 3]
    assert b.tolist() == [996, 997, 998, 999]


def test_different_tensors_share_nothing() -> None:
    a, b = sent([torch.zeros(4), torch.zeros(4)])
    assert not shares_memory(a, b)


# ---- layouts and devices


def same_sparse(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (
        a.layout is b.layout and a.shape == b.shape and a.dtype is b.dtype and torch.equal(a.to_dense(), b.to_dense())
    )


def test_sparse_coo_keeps_whether_it_is_coalesced() -> None:
    indices = torch.tensor([[0, 2, 0], [1, 0, 1]])
    loose = torch.sparse_coo_tensor(indices, torch.tensor([1.0, 2.0, 3.0]), (3, 4))
    hybrid = torch.sparse_coo_tensor(indices, torch.randn(3, 2), (3, 4, 2))
    empty = torch.sparse_coo_tensor(size=(2, 2))
    received = sent([loose, loose.coalesce(), hybrid, empty, loose.clone().requires_grad_()])
    assert [t.is_coalesced() for t in received[:2]] == [False, True]
    assert received[0]._nnz() == 3
    for original, tensor in zip([loose, loose, hybrid, empty], received, strict=False):
        assert same_sparse(original, tensor)
    assert received[4].requires_grad
    assert received[4].is_leaf


@pytest.mark.parametrize("layout", [torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc], ids=str)
def test_compressed_sparse_layouts_round_trip(layout: torch.layout) -> None:
    dense = torch.eye(4) * torch.arange(4.0)
    blocks = (2, 2) if layout in (torch.sparse_bsr, torch.sparse_bsc) else None
    x = dense.to_sparse(layout=layout, blocksize=blocks)
    (y,) = sent([x])
    assert same_sparse(x, y)


def test_meta_tensors_round_trip() -> None:
    x = torch.empty(3, 10**12, device="meta", dtype=torch.float16).t().requires_grad_()
    assert encode_tensors([x]).size == 0
    (y,) = sent([x])
    assert (y.device, y.shape, y.stride(), y.dtype, y.requires_grad) == (x.device, x.shape, x.stride(), x.dtype, True)


def test_a_tensor_for_a_missing_device_is_refused() -> None:
    layout = encode_tensors([torch.ones(3)])
    region = bytearray(layout.size)
    layout.write(region)
    foreign = msgspec.structs.replace(layout.descriptors[0], device="cuda:7", requires_grad=True)
    with pytest.raises(PayloadError, match=r"cuda:7.*device map"):
        decode_tensors([foreign], region)


def test_unsupported_layouts_are_refused_by_name() -> None:
    with pytest.raises(PayloadError, match="mkldnn"):
        encode_tensors([torch.randn(3).to_mkldnn()])
    with pytest.raises(PayloadError, match="nested"):
        encode_tensors([torch._nested_tensor_from_tensor_list([torch.ones(2), torch.ones(3)])])


def test_tensors_without_memory_are_refused() -> None:
    freed = torch.ones(3)
    freed.untyped_storage().resize_(0)
    with pytest.raises(PayloadError, match="no memory"):
        encode_tensors([freed])
    refused: list[PayloadError] = []

    def inside(x: torch.Tensor) -> torch.Tensor:
        try:
            encode_tensors([x])
        except PayloadError as error:
            refused.append(error)
        return x

    torch.vmap(inside)(torch.ones(2, 3))
    assert len(refused) == 1


def test_a_storage_freed_before_the_write_is_noticed() -> None:
    x = torch.ones(8)
    alone, together = encode_tensors([x]), encode_tensors([x, x[:4]])
    x.untyped_storage().resize_(0)
    for layout in (alone, together):
        with pytest.raises(PayloadError, match="freed"):
            layout.write(bytearray(layout.size))


# ---- buffers and memory


def test_other_buffers_are_received_as_memoryviews() -> None:
    x, data, empty = torch.ones(3), bytearray(b"abc" * 10), bytearray()
    a, view, nothing, b = sent([x, pickle.PickleBuffer(data), pickle.PickleBuffer(empty), x.clone()])
    assert isinstance(view, memoryview)
    assert bytes(view) == data
    assert bytes(nothing) == b""
    assert torch.equal(a, b)


def test_tensors_use_the_memory_of_the_region_and_keep_it_alive() -> None:
    class Region(bytearray):
        """A bytearray that can be watched."""

    layout = encode_tensors([torch.ones(8)])
    region = Region(layout.size)
    layout.write(region)
    gone = weakref.ref(region)
    (x,) = decode_tensors(layout.descriptors, region)
    region[:4] = torch.tensor([5.0]).numpy().tobytes()
    assert isinstance(x, torch.Tensor)
    assert x[0] == 5
    del region
    gc.collect()
    assert gone() is not None
    del x
    gc.collect()
    assert gone() is None


def test_a_small_attachment_does_not_keep_a_large_region_alive() -> None:
    class Region(bytearray):
        """A bytearray that can be watched."""

    x = torch.arange(10.0)
    layout = encode_tensors([x, torch.zeros(2**19), pickle.PickleBuffer(b"abc"), x[2:]])
    region = Region(layout.size)
    layout.write(region)
    gone = weakref.ref(region)
    small, large, raw, view = decode_tensors(layout.descriptors, region)
    del region, large
    gc.collect()
    assert gone() is None
    assert isinstance(small, torch.Tensor)
    assert isinstance(view, torch.Tensor)
    assert small.tolist() == x.tolist()
    assert shares_memory(small, view)
    assert raw == b"abc"


def test_the_region_must_be_large_enough_and_writable() -> None:
    layout = encode_tensors([torch.ones(8)])
    with pytest.raises(ValueError, match="needs 32"):
        layout.write(bytearray(16))
    with pytest.raises(ValueError, match="writable"):
        decode_tensors(layout.descriptors, memoryview(bytes(32)))


def test_a_region_of_another_item_size_is_used_as_bytes() -> None:
    layout = encode_tensors([torch.ones(8), pickle.PickleBuffer(b"x" * 8)])
    region = memoryview(bytearray(48)).cast("d")
    layout.write(region)
    x, raw = decode_tensors(layout.descriptors, region)
    assert isinstance(x, torch.Tensor)
    assert x.sum() == 8
    assert raw == b"x" * 8


def test_a_descriptor_of_a_small_tensor_is_small() -> None:
    assert len(msgspec.msgpack.encode(encode_tensors([torch.randn(4, 4)]).descriptors)) <= 14


# ---- the thread's state


class Interfering(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"the user's mode saw {func}")


class InterferingDispatch(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"the user's mode saw {func}")


MODES = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "default_device": lambda: torch.device("meta"),
    "function_mode": Interfering,
    "dispatch_mode": InterferingDispatch,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
}


@pytest.mark.parametrize("mode", MODES)
def test_the_torch_state_of_the_thread_has_no_effect(mode: str) -> None:
    x = torch.arange(12.0).reshape(3, 4).requires_grad_()
    y = torch.arange(6.0)
    attachments = [x, x.t()[::2], y, y[:3], torch.eye(3).to_sparse()]
    with MODES[mode]():
        a, part, b, half, c = sent(attachments)
        left = has_default_torch_state()
    assert not left  # the mode was taken up again
    assert has_default_torch_state()
    assert all(t.is_leaf and not t.is_inference() and t.device.type == "cpu" for t in (a, part, b, half, c))
    assert a.requires_grad
    assert torch.equal(a, x)
    assert torch.equal(c.to_dense(), torch.eye(3))
    half.mul_(a.sum() * 0)  # a view made under no_grad would refuse this
    assert b.requires_grad


def test_the_default_dtype_has_no_effect() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        (x, empty) = sent([torch.ones(2, dtype=torch.float32), torch.empty(0, dtype=torch.float32)])
    finally:
        torch.set_default_dtype(torch.float32)
    assert x.dtype is empty.dtype is torch.float32


def test_inference_tensors_can_be_sent() -> None:
    with torch.inference_mode():
        x = torch.arange(6.0).reshape(2, 3)
        gaps = x[:, ::2]
    for original in (x, gaps):
        (y,) = sent([original])
        assert torch.equal(y, original)
        assert not y.is_inference()


def test_modes_are_restored_in_order_even_after_an_error() -> None:
    outer, inner = Interfering(), Interfering()
    with outer, inner:
        with pytest.raises(ProtocolError):
            decode_tensors([TensorDescriptor(99, 0, 0, ())], bytearray(16))
        assert torch.overrides._get_current_function_mode_stack() == [outer, inner]


# ---- what a peer may claim


def test_invalid_descriptors_are_refused() -> None:
    def refused(descriptor: TensorDescriptor, error: type[Exception] = ProtocolError) -> None:
        with pytest.raises(error):
            decode_tensors([descriptor], bytearray(64))

    byte, single = forms.CODES[torch.uint8], forms.CODES[torch.float32]
    refused(TensorDescriptor(forms.STRIDED, byte, 0, (65,)))
    refused(TensorDescriptor(forms.STRIDED, byte, 16, (49,)))
    refused(TensorDescriptor(forms.STRIDED, byte, -16, (4,)))
    refused(TensorDescriptor(forms.STRIDED, byte, 3, (4,)))
    refused(TensorDescriptor(forms.STRIDED, byte, 0, (-1,)))
    refused(TensorDescriptor(forms.STRIDED, byte, 0, (4,), (2,)))
    refused(TensorDescriptor(forms.STRIDED, byte, 0, (4,), (-1,)))
    refused(TensorDescriptor(forms.STRIDED, byte, 0, (4,), (1, 1)))
    refused(TensorDescriptor(forms.STRIDED, byte, 0, (2**64 - 1,)), LimitExceeded)
    refused(TensorDescriptor(forms.STRIDED, byte, 0, (2**32, 2**32)), LimitExceeded)
    refused(TensorDescriptor(forms.STRIDED, byte, 0, (0, 2**40, 2**40)), LimitExceeded)
    refused(TensorDescriptor(forms.STRIDED, byte, 0, (1,) * 65), LimitExceeded)
    refused(TensorDescriptor(forms.STRIDED, byte, 0, (4,), requires_grad=True))
    refused(TensorDescriptor(forms.STRIDED, 200, 0, (4,)))
    refused(TensorDescriptor(forms.STRIDED, -1, 0, (4,)))
    for form in (
        forms.STRIDED,
        forms.VIEW,
        forms.META,
    ):  # torch crashes on a quantised tensor without parameters
        refused(TensorDescriptor(form, forms.CODES[torch.qint8], 0, (4,), (1,), detail=(64, 0, 0, 0)))
    refused(TensorDescriptor(forms.BUFFER, 0, 0, (65,)))
    refused(TensorDescriptor(forms.BUFFER, 0, 0, (2, 2)))
    refused(TensorDescriptor(forms.VIEW, single, 0, (4,), (1,), detail=(64, 13, 0, 0)))
    refused(TensorDescriptor(forms.VIEW, single, 0, (4,), (1,), detail=(128, 0, 0, 0)))
    refused(TensorDescriptor(forms.VIEW, single, 0, (4,), (1,), detail=(64, -1, 0, 0)))
    refused(TensorDescriptor(forms.VIEW, single, 0, (4,), (1,), detail=(64, 0.5, 0, 0)))
    refused(TensorDescriptor(forms.VIEW, single, 0, (4,), (1,)))
    refused(TensorDescriptor(forms.VIEW, single, 0, (2,), (2**62,), detail=(64, 0, 0, 0)))
    refused(TensorDescriptor(forms.META, single, 0, (2**62, 2), (1, 1)), LimitExceeded)
    refused(TensorDescriptor(forms.META, single, 0, (2,)))
    refused(TensorDescriptor(forms.COO, single, 0, (2, 2)))
    refused(TensorDescriptor(11, single, 0, (2, 2)))


def test_overlapping_attachments_are_refused() -> None:
    one = TensorDescriptor(forms.STRIDED, forms.CODES[torch.uint8], 0, (48,))
    with pytest.raises(ProtocolError, match="overlapping attachments"):
        decode_tensors([one, one], bytearray(64))


def test_sparse_indices_beyond_the_shape_are_refused() -> None:
    layout = encode_tensors([torch.eye(4).to_sparse(), torch.eye(4).to_sparse_csr()])
    region = bytearray(layout.size)
    layout.write(region)
    for descriptor in layout.descriptors:
        with pytest.raises(ProtocolError, match="do not fit"):
            decode_tensors([msgspec.structs.replace(descriptor, shape=(2, 2))], region)


sizes = st.one_of(st.integers(0, 5), st.sampled_from([-1, 2**31, 2**62, 2**63, 2**64 - 1]))
offsets = st.one_of(st.integers(0, 20).map(lambda n: n * 16), st.sampled_from([-16, 3, 2**63, 2**64 - 16]))


def descriptors(parts: st.SearchStrategy[Any]) -> st.SearchStrategy[TensorDescriptor]:
    return st.builds(
        TensorDescriptor,
        form=st.integers(0, 12),
        dtype=st.integers(-1, len(forms.DTYPES)),
        offset=offsets,
        shape=st.lists(sizes, max_size=4).map(tuple),
        stride=st.lists(sizes, max_size=4).map(tuple),
        requires_grad=st.booleans(),
        device=st.sampled_from(["", "", "", "meta", "nowhere", "cuda:0"]),
        parts=parts,
        detail=st.lists(st.one_of(sizes, st.floats(), st.sampled_from([16, 64])), max_size=3).map(tuple),
    )


@settings(deadline=None, max_examples=500)
@given(
    st.lists(descriptors(st.lists(descriptors(st.just(())), max_size=3).map(tuple)), max_size=3),
    st.binary(max_size=256),
)
def test_no_descriptor_reaches_beyond_the_region(claims: list[TensorDescriptor], content: bytes) -> None:
    region = bytearray(content)
    try:
        received = decode_tensors(claims, region)
    except (ProtocolError, PayloadError):
        return
    for item in received:
        if isinstance(item, memoryview):
            assert item.nbytes <= len(region)
        elif item.layout is torch.strided and not item.is_meta and not item.is_quantized and item.numel():
            assert item.untyped_storage().nbytes() <= len(region)
            item.sum() if item.dtype is torch.float32 and item.numel() < 1000 else item.shape


@settings(deadline=None, max_examples=300)
@given(st.data())
def test_a_damaged_composite_gives_a_valid_tensor_or_an_error(data: st.DataObject) -> None:
    values, scales, zero_points = torch.linspace(0, 3, 16).reshape(4, 4), torch.full((4,), 0.5), torch.arange(4)
    honest = [
        torch.eye(4).to_sparse(),
        *(torch.eye(4).to_sparse(layout=layout) for layout in (torch.sparse_csr, torch.sparse_csc)),
        *(torch.eye(4).to_sparse(layout=layout, blocksize=(2, 2)) for layout in (torch.sparse_bsr, torch.sparse_bsc)),
        torch.quantize_per_tensor(values, 0.5, 1, torch.qint8),
        torch.quantize_per_channel(values, scales, zero_points, 1, torch.quint8),
    ]
    layout = encode_tensors([data.draw(st.sampled_from(honest))])
    region = bytearray(layout.size)
    layout.write(region)
    (descriptor,) = layout.descriptors
    parts = list(descriptor.parts)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(parts) - 1))
        change = data.draw(
            st.sampled_from(["region", "shape", "form", "detail", "part shape", "part dtype", "part offset"])
        )
        if change == "region":
            region[data.draw(st.integers(0, len(region) - 1))] = data.draw(st.integers(0, 255))
        elif change == "shape":
            descriptor = msgspec.structs.replace(descriptor, shape=tuple(data.draw(st.lists(sizes, max_size=4))))
        elif change == "form":
            descriptor = msgspec.structs.replace(descriptor, form=data.draw(st.integers(forms.COO, 11)))
        elif change == "detail":
            detail = data.draw(st.lists(st.one_of(sizes, st.floats()), max_size=2))
            descriptor = msgspec.structs.replace(descriptor, detail=tuple(detail))
        elif change == "part shape":
            shape = tuple(data.draw(st.lists(st.integers(0, 5), max_size=3)))
            parts[at] = msgspec.structs.replace(parts[at], shape=shape, stride=())
        elif change == "part dtype":
            parts[at] = msgspec.structs.replace(parts[at], dtype=data.draw(st.integers(0, len(forms.DTYPES))))
        else:
            parts[at] = msgspec.structs.replace(parts[at], offset=data.draw(offsets))
    try:
        (x,) = decode_tensors([msgspec.structs.replace(descriptor, parts=tuple(parts))], region)
    except ProtocolError:
        return
    assert isinstance(x, torch.Tensor)
    if x.dtype is torch.float32 and x.numel() < 1000:
        x.to_dense()
    elif x.is_quantized:
        assert x.int_repr().shape == x.shape
