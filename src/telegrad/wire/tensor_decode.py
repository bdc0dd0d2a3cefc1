"""Restore attachments on the receiver: check their descriptors, and create tensors over the region itself."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from telegrad.errors import ProtocolError
from telegrad.torch_private import make_per_channel_quantized, make_per_tensor_quantized, neg_view
from telegrad.wire.descriptors import (
    ALIGNMENT,
    BSC,
    BSR,
    BUFFER,
    CODES,
    COMPRESSED,
    CONJUGATED,
    COO,
    CSC,
    CSR,
    DIRECT,
    DTYPES,
    MAX_DIMENSIONS,
    META,
    NEGATED,
    QUANTIZED,
    QUANTIZED_CHANNELS,
    STRIDED,
    VIEW,
    TensorDescriptor,
    checked_extent,
    dtype_of,
    integers_of,
)
from telegrad.wire.devices import DirectPath
from telegrad.wire.shared_span import SharedSpan
from telegrad.wire.staging import ToDevices
from telegrad.wire.torch_state import default_torch_state, has_default_torch_state

SMALL_ATTACHMENT = 64 * 1024
LARGE_REGION = 1024 * 1024
_PLAIN_DTYPES = CODES[torch.qint8]
_frombuffer = torch.frombuffer


def decode_tensors(
    descriptors: Sequence[TensorDescriptor], region: bytearray | memoryview, direct: DirectPath | None = None
) -> list[torch.Tensor | memoryview]:
    """Return the attachments: tensors, and memoryviews for other buffers, over the region without a copy.

    The region must be writable, and belongs to the attachments afterwards. Tensors that belong on a device are copied
    there; `direct` is the path for those that are there already. Raise ProtocolError for a descriptor that does not fit
    the region, PayloadError for a device or dtype that this worker does not have.
    """
    if not descriptors:
        return []
    if has_default_torch_state():
        plain = _decode_plain(descriptors, region)
        if plain is not None:
            return plain
        return _RegionDecoder(region, direct).decode_all(descriptors)
    decoder = _RegionDecoder(region, direct)
    with default_torch_state():
        return decoder.decode_all(descriptors)


def _decode_plain(
    descriptors: Sequence[TensorDescriptor], region: bytearray | memoryview
) -> list[torch.Tensor | memoryview] | None:
    """Create contiguous non-empty tensors over a region, the common case, faster than `_RegionDecoder`.

    Return None for anything else, including invalid descriptors: `_RegionDecoder` raises the matching error.
    """
    available = len(region)
    if type(region) is memoryview and (region.readonly or region.format != "B"):
        return None
    made: list[torch.Tensor | memoryview] = []
    code, dimensions, count, nbytes, end = -1, 0, 0, 0, 0
    shape: tuple[int, ...] = ()
    dtype: torch.dtype | None = None
    for descriptor in descriptors:
        if descriptor.form != STRIDED or descriptor.stride or descriptor.device:
            return None
        if descriptor.dtype != code or descriptor.shape != shape:  # else as the one before
            code, shape = descriptor.dtype, descriptor.shape
            dimensions = len(shape)
            if not 0 <= code < _PLAIN_DTYPES or dimensions > MAX_DIMENSIONS:
                return None
            dtype = DTYPES[code]
            count = 1
            for size in shape:
                if not 0 < size <= available:
                    return None
                count *= size
            if dtype is None or count > available:
                return None
            nbytes = count * dtype.itemsize
        offset = descriptor.offset
        # Attachments must be in ascending order, as our own encoder writes them, so none overlaps another.
        if dtype is None or offset < end or offset % ALIGNMENT:
            return None
        end = offset + nbytes
        if end > available:
            return None
        if nbytes < SMALL_ATTACHMENT and available > LARGE_REGION:
            tensor = _frombuffer(bytearray(region[offset:end]), dtype=dtype, count=count)
        else:
            tensor = _frombuffer(region, dtype=dtype, count=count, offset=offset)
        if dimensions != 1:
            tensor.resize_(shape)
        if descriptor.requires_grad:
            if not (dtype.is_floating_point or dtype.is_complex):
                return None
            tensor.requires_grad_()
        made.append(tensor)
    return made


class _RegionDecoder:
    """Restores attachments from one region, and checks every descriptor before using it."""

    __slots__ = ("_claimed", "_direct", "_nbytes", "_spans", "_to_devices", "_view")

    def __init__(self, region: bytearray | memoryview, direct: DirectPath | None) -> None:
        view = memoryview(region)
        if view.readonly:
            raise ValueError("the region must be writable: tensors made in it can be written to")
        self._view = view.cast("B") if view.format != "B" or view.ndim != 1 else view
        self._nbytes = view.nbytes
        self._to_devices = ToDevices()
        self._direct = direct
        self._claimed = 0
        self._spans: dict[tuple[int, int], SharedSpan] = {}

    def decode_all(self, descriptors: Sequence[TensorDescriptor]) -> list[torch.Tensor | memoryview]:
        views = [descriptor for descriptor in descriptors if descriptor.form == VIEW]
        for descriptor in views:
            self._declare_view(descriptor)
        tensors = [self._decode(descriptor) for descriptor in descriptors]
        self._to_devices.wait()
        if views:
            # Only after all are created: a view of a tensor that requires grad would not be a leaf.
            for descriptor, tensor in zip(descriptors, tensors, strict=True):
                if descriptor.form == VIEW and descriptor.requires_grad and isinstance(tensor, torch.Tensor):
                    _require_grad(tensor, descriptor)
        return tensors

    def _decode(self, descriptor: TensorDescriptor) -> torch.Tensor | memoryview:
        form = descriptor.form
        if form == STRIDED:
            tensor = self._strided(descriptor)
        elif form == BUFFER:
            return self._buffer(descriptor)
        elif form == VIEW:
            tensor = self._view_of_span(descriptor)
        elif form == META:
            checked_extent(descriptor)
            shape, stride = descriptor.shape, descriptor.stride
            if len(stride) != len(shape):
                raise ProtocolError(f"a peer announces a meta tensor without strides: {descriptor}")
            tensor = torch.empty_strided(shape, stride, dtype=dtype_of(descriptor), device="meta")
        elif form == DIRECT:
            tensor = self._open(descriptor)
        else:
            tensor = self._composite(descriptor)
        if descriptor.device and form not in (META, VIEW):
            tensor = self._to_devices.copy(tensor, descriptor.device)
        if descriptor.requires_grad and form != VIEW:
            _require_grad(tensor, descriptor)
        return tensor

    def _claim(self, offset: int, nbytes: int) -> tuple[memoryview | bytearray, int]:
        """Check the position of one attachment. Return a buffer that contains it, and its offset there."""
        if offset < 0 or offset % ALIGNMENT or offset + nbytes > self._nbytes:
            raise ProtocolError(f"a peer places {nbytes} bytes at {offset} in a region of {self._nbytes} bytes")
        self._claimed += nbytes
        if self._claimed > self._nbytes:
            raise ProtocolError(f"a peer places overlapping attachments in a region of {self._nbytes} bytes")
        if nbytes < SMALL_ATTACHMENT and self._nbytes > LARGE_REGION:
            return bytearray(self._view[offset : offset + nbytes]), 0
        return self._view, offset

    def _strided(self, descriptor: TensorDescriptor) -> torch.Tensor:
        dtype = dtype_of(descriptor)
        shape, stride = descriptor.shape, descriptor.stride
        count = checked_extent(descriptor)
        if count != math.prod(shape):
            raise ProtocolError(f"a peer announces a tensor with gaps or overlaps: {descriptor}")
        if not count:
            return torch.empty_strided(shape, stride, dtype=dtype) if stride else torch.empty(shape, dtype=dtype)
        buffer, offset = self._claim(descriptor.offset, count * dtype.itemsize)
        tensor = torch.frombuffer(buffer, dtype=dtype, count=count, offset=offset)
        # In place, because the result must not be a view: autograd treats views differently.
        if stride:
            return tensor.as_strided_(shape, stride)
        return tensor if len(shape) == 1 else tensor.resize_(shape)

    def _buffer(self, descriptor: TensorDescriptor) -> memoryview:
        count = checked_extent(descriptor)
        if len(descriptor.shape) != 1 or descriptor.stride:
            raise ProtocolError(f"a peer announces a buffer that is not one-dimensional: {descriptor}")
        buffer, offset = self._claim(descriptor.offset, count)
        return memoryview(buffer)[offset : offset + count]

    def _declare_view(self, descriptor: TensorDescriptor) -> None:
        """Check a tensor that overlaps with others, before any of them is created."""
        dtype, extent = dtype_of(descriptor), checked_extent(descriptor)
        nbytes, first, relation, interpretation = integers_of(descriptor, 4)
        if nbytes <= 0 or nbytes % ALIGNMENT or first < 0 or (first + extent) * dtype.itemsize > nbytes or not extent:
            raise ProtocolError(f"a peer announces a view that reaches beyond its span: {descriptor}")
        if len(descriptor.stride) != len(descriptor.shape):
            raise ProtocolError(f"a peer announces a view without strides: {descriptor}")
        if (
            interpretation & ~(CONJUGATED | NEGATED)
            or (interpretation and relation)
            or (interpretation & CONJUGATED and not dtype.is_complex)
        ):
            raise ProtocolError(f"a peer announces a view that cannot be read: {descriptor}")
        key = descriptor.offset, nbytes
        if key not in self._spans:
            self._spans[key] = SharedSpan(*self._claim(*key), nbytes, descriptor.device, self._to_devices)
        self._spans[key].declare(descriptor, dtype, first, relation)

    def _view_of_span(self, descriptor: TensorDescriptor) -> torch.Tensor:
        nbytes, first, relation, interpretation = integers_of(descriptor, 4)
        span = self._spans[descriptor.offset, nbytes]
        tensor = span.create(descriptor, dtype_of(descriptor), first, relation)
        if interpretation & CONJUGATED:
            tensor = tensor.conj()
        return neg_view(tensor) if interpretation & NEGATED else tensor

    def _open(self, descriptor: TensorDescriptor) -> torch.Tensor:
        if self._direct is None:
            raise ProtocolError(
                "a peer sends tensors directly between devices, which is switched off here: set direct_devices on all "
                "workers or on none"
            )
        if len(descriptor.parts) != 1 or descriptor.parts[0].form != BUFFER:
            raise ProtocolError(f"a peer announces a tensor on a device without a handle: {descriptor}")
        tensor = self._direct.open(bytes(self._buffer(descriptor.parts[0])))
        if tuple(tensor.shape) != descriptor.shape or tensor.dtype is not dtype_of(descriptor):
            raise ProtocolError(f"a peer announces another tensor than its handle has: {descriptor}")
        return tensor

    def _composite(self, descriptor: TensorDescriptor) -> torch.Tensor:
        form, shape = descriptor.form, descriptor.shape
        needed = {COO: 2, CSR: 3, CSC: 3, BSR: 3, BSC: 3, QUANTIZED: 1, QUANTIZED_CHANNELS: 3}.get(form)
        if needed is None:
            raise ProtocolError(f"a peer announces a tensor of unknown form {form}")
        if len(descriptor.parts) != needed or any(part.form != STRIDED for part in descriptor.parts):
            raise ProtocolError(f"a peer announces a tensor of form {form} without its {needed} parts")
        checked_extent(descriptor)
        parts = [self._strided(part) for part in descriptor.parts]
        try:
            if form == COO:
                indices, values = parts
                (coalesced,) = integers_of(descriptor, 1)
                return torch.sparse_coo_tensor(
                    indices, values, shape, is_coalesced=bool(coalesced), check_invariants=True
                )
            if form == QUANTIZED:
                scale, zero_point = descriptor.detail
                return make_per_tensor_quantized(parts[0], float(scale), int(zero_point))
            if form == QUANTIZED_CHANNELS:
                (axis,) = integers_of(descriptor, 1)
                if not 0 <= axis < parts[0].dim() or any(p.shape != parts[0].shape[axis : axis + 1] for p in parts[1:]):
                    raise ProtocolError(f"a peer announces a quantised tensor whose channels do not fit: {descriptor}")
                integers, scales, zero_points = parts
                if scales.is_complex() or zero_points.is_complex() or scales.dtype == torch.bool:
                    raise ProtocolError(
                        f"a peer announces a quantised tensor whose scales are not real numbers: {descriptor}"
                    )
                return make_per_channel_quantized(integers, scales, zero_points, axis)
            compressed, plain, values = parts
            layout = COMPRESSED[form]
            return torch.sparse_compressed_tensor(
                compressed, plain, values, shape, dtype=values.dtype, layout=layout, check_invariants=True
            )
        except (RuntimeError, TypeError, ValueError, OverflowError, IndexError) as error:
            if isinstance(error, ProtocolError):
                raise
            raise ProtocolError(f"the parts of a tensor do not fit together: {error}") from error


def _require_grad(tensor: torch.Tensor, descriptor: TensorDescriptor) -> None:
    if not (tensor.is_floating_point() or tensor.is_complex()):
        raise ProtocolError(f"a peer announces a tensor that requires grad, with a dtype that cannot: {descriptor}")
    tensor.requires_grad_()
