"""The contents of tensors travel beside the pickle, in one block of memory; this module fills that block and reads it.

The block is called a region. The sender describes each attachment with a ``TensorDescriptor`` and writes its bytes at a
multiple of 16; that copy is the snapshot. The receiver checks every descriptor against the region before it believes
it, and makes tensors that lie in the region itself. What arrives is what was sent, with these rules:

- A dense tensor keeps its strides. A view with gaps, or an expanded one, ships its own elements only, contiguous.
- Views of one CPU storage in one message share memory on arrival, provided that none of them requires grad and that the
  span from their lowest to their highest byte is at most twice their own elements. Otherwise each ships its own.
  Conjugated and negated views are resolved, so they never share.
- ``requires_grad`` arrives as it was, on leaves. ``.grad`` and hooks stay behind.
- Small attachments are copied out of a large region, so that a scalar does not keep a gigabyte alive.
- Nothing of the calling thread's torch state (default device, grad or inference mode, modes of the user) is inherited.

>>> x = torch.arange(6.0).reshape(2, 3).t()
>>> layout = lay_out([x])
>>> region = bytearray(layout.size)
>>> layout.write(region)
>>> y = build(layout.descriptors, region)[0]
>>> bool((y == x).all()), y.stride()
(True, (1, 3))
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import pickle
from collections.abc import Iterator, Mapping, Sequence

import msgspec
import torch
from torch import _C  # the thread's mode stacks have no public interface

from telegrad.errors import LimitExceeded, PayloadError, ProtocolError

ALIGNMENT = 16
MAX_DIMENSIONS = 64
SMALL_ATTACHMENT = 64 * 1024
LARGE_REGION = 1024 * 1024
SPAN_FACTOR = 2

# Forms of a descriptor. The numbers are part of the protocol.
STRIDED, BUFFER, VIEW, META, COO, CSR, CSC, BSR, BSC, QUANTIZED, QUANTIZED_CHANNELS = range(11)

_COMPRESSED = {CSR: torch.sparse_csr, CSC: torch.sparse_csc, BSR: torch.sparse_bsr, BSC: torch.sparse_bsc}
_COMPRESSED_FORM = {layout: form for form, layout in _COMPRESSED.items()}

# A dtype travels as its place in this table, so new ones are added at the end only.
_DTYPE_NAMES = (
    *("bool", "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64"),
    *("float16", "bfloat16", "float32", "float64", "complex32", "complex64", "complex128"),
    *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2"),
    *("bits8", "bits16", "bits1x8", "bits2x4", "bits4x2"),
    *("int1", "int2", "int3", "int4", "int5", "int6", "int7"),
    *("uint1", "uint2", "uint3", "uint4", "uint5", "uint6", "uint7"),
    *("qint8", "quint8", "qint32"),
)
_DTYPES: tuple[torch.dtype | None, ...] = tuple(getattr(torch, name, None) for name in _DTYPE_NAMES)
_CODES = {dtype: code for code, dtype in enumerate(_DTYPES) if dtype is not None}
# torch cannot copy elements of these; they are one byte each, so they are copied as bytes.
_COPIED_AS_BYTES = frozenset(getattr(torch, f"{sign}int{bits}", None) for sign in ("", "u") for bits in range(1, 8))

_INT64_MAX = 2**63 - 1
_UNINTERCEPTED = (torch.Tensor, torch.nn.Parameter)  # types whose methods no user code can intercept
_is_grad_enabled = torch.is_grad_enabled
_is_inference_mode_enabled = torch.is_inference_mode_enabled
_function_modes = _C._len_torch_function_stack
_dispatch_modes = _C._len_torch_dispatch_stack


class TensorDescriptor(msgspec.Struct, frozen=True, array_like=True):
    """How to read one attachment out of the region. It comes from a peer: nothing in it is true until checked."""

    form: int
    dtype: int
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...] = ()  # empty: contiguous
    requires_grad: bool = False
    device: str = ""  # empty: the CPU
    parts: tuple[TensorDescriptor, ...] = ()  # the plain tensors that a sparse or quantised one consists of
    detail: tuple[int | float, ...] = ()  # VIEW: span bytes, first element. COO: coalesced. QUANTIZED*: parameters


class Layout:
    """Where each attachment goes in a region of ``size`` bytes. ``write`` copies them there."""

    __slots__ = ("_copies", "_moves", "descriptors", "size")

    def __init__(self) -> None:
        self.descriptors: tuple[TensorDescriptor, ...] = ()
        self.size = 0
        self._moves: list[tuple[int, torch.Tensor, int]] = []  # offset, dense tensor, bytes
        self._copies: list[_Span | _Gather | _Bytes] = []  # all that is not one dense tensor

    def reserve(self, nbytes: int) -> int:
        """Take the next ``nbytes`` of the region and return their offset."""
        offset = self.size
        self.size = offset + (nbytes + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
        return offset

    def write(self, region: bytearray | memoryview) -> None:
        """Copy every attachment into the region. Afterwards the sender may change its tensors.

        ``region`` is a writable contiguous buffer of at least ``size`` bytes.
        """
        if not self.size:
            return
        view = memoryview(region)
        if view.nbytes < self.size:
            raise ValueError(f"the region has {view.nbytes} bytes, but the layout needs {self.size}")
        if _nothing_intercepts():
            self._write(view)
        else:
            with neutral():
                self._write(view)

    def _write(self, view: memoryview) -> None:
        start = ctypes.addressof(ctypes.c_char.from_buffer(view))
        for offset, tensor, nbytes in self._moves:
            address = tensor.data_ptr()
            if not address:
                raise _no_contents(tensor)
            ctypes.memmove(start + offset, address, nbytes)
        for copy in self._copies:
            copy.write(view)


class _Span(msgspec.Struct):
    """A piece of a storage, for the views that share it."""

    offset: int
    storage: torch.UntypedStorage
    first: int
    nbytes: int

    def write(self, region: memoryview) -> None:
        if self.storage.nbytes() < self.first + self.nbytes:
            raise PayloadError("the storage of a tensor was freed or made smaller while the tensor was being sent")
        target = ctypes.addressof(ctypes.c_char.from_buffer(region, self.offset))
        ctypes.memmove(target, self.storage.data_ptr() + self.first, self.nbytes)


class _Gather(msgspec.Struct):
    """A tensor that is copied element by element; torch resolves gaps, conjugation and devices on the way."""

    offset: int
    source: torch.Tensor
    stride: tuple[int, ...]  # on arrival

    def write(self, region: memoryview) -> None:
        source, dtype = self.source, self.source.dtype
        if dtype in _COPIED_AS_BYTES:
            source, dtype = source.view(torch.uint8), torch.uint8
        target = torch.frombuffer(region, dtype=dtype, count=source.numel(), offset=self.offset)
        target = target.as_strided_(source.shape, self.stride) if self.stride else target.resize_(source.shape)
        target.copy_(source)


class _Bytes(msgspec.Struct):
    """A buffer that is no tensor."""

    offset: int
    source: memoryview

    def write(self, region: memoryview) -> None:
        region.cast("B")[self.offset : self.offset + self.source.nbytes] = self.source


def lay_out(attachments: Sequence[torch.Tensor | pickle.PickleBuffer]) -> Layout:
    """Describe the attachments and give each its place in a region."""
    layout = Layout()
    if attachments:
        if _nothing_intercepts():
            _describe_all(layout, attachments)
        else:
            with neutral():
                _describe_all(layout, attachments)
    return layout


def build(
    descriptors: Sequence[TensorDescriptor],
    region: bytearray | memoryview,
    device_map: Mapping[str, str] | None = None,
) -> list[torch.Tensor | memoryview]:
    """Make the attachments again: tensors, and memoryviews for other buffers, that lie in the region without a copy.

    The region must be writable, and belongs to what is returned from now on. ``device_map`` says where tensors of the
    sender's devices go ("cuda:0" to "cuda:1"); without an entry they go to the device of the same name. Raises
    ProtocolError for a descriptor that does not fit the region, PayloadError for a device or dtype unknown here.
    """
    if not descriptors:
        return []
    reader = _Reader(region, device_map)
    if thread_is_neutral():
        return [reader.read(descriptor) for descriptor in descriptors]
    with neutral():
        return [reader.read(descriptor) for descriptor in descriptors]


def thread_is_neutral() -> bool:
    """Whether the calling thread has torch's initial state, so that there is nothing to leave."""
    return (
        _is_grad_enabled() and not _is_inference_mode_enabled() and not _function_modes() and not _dispatch_modes()
    ) and not _C._is_any_autocast_enabled()


def _nothing_intercepts() -> bool:
    """Whether tensors can be read as they are. Grad mode does not matter: gradients are sent without it."""
    return (
        not _is_inference_mode_enabled()
        and not _function_modes()
        and not _dispatch_modes()
        and not _C._is_any_autocast_enabled()
    )


@contextlib.contextmanager
def neutral() -> Iterator[None]:
    """Leave the thread's torch modes (also the default device, which is one), and take them up again at the end."""
    with contextlib.ExitStack() as stack:
        while _function_modes():
            stack.callback(_C._push_on_torch_function_stack, _C._pop_torch_function_stack())
        while _dispatch_modes():
            stack.callback(_C._push_on_torch_dispatch_stack, _C._pop_torch_dispatch_stack(None))
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        if _C._is_any_autocast_enabled():
            accelerator = torch.accelerator.current_accelerator()
            for device in {"cpu", accelerator.type if accelerator else "cpu"}:
                stack.enter_context(torch.autocast(device, enabled=False))
        yield


# ---- the sender's side


def _describe_all(layout: Layout, attachments: Sequence[torch.Tensor | pickle.PickleBuffer]) -> None:
    plain = [
        a if type(a) in _UNINTERCEPTED or isinstance(a, pickle.PickleBuffer) else _as_plain(a) for a in attachments
    ]
    shared = _shared_views(layout, plain) if len(plain) > 1 else {}
    if not shared:
        layout.descriptors = tuple([_describe(layout, attachment) for attachment in plain])
        return
    layout.descriptors = tuple(
        [shared.get(index) or _describe(layout, attachment) for index, attachment in enumerate(plain)]
    )


def _describe(layout: Layout, attachment: torch.Tensor | pickle.PickleBuffer) -> TensorDescriptor:
    if isinstance(attachment, pickle.PickleBuffer):
        raw = attachment.raw()
        offset = layout.reserve(raw.nbytes)
        layout._copies.append(_Bytes(offset, raw))
        return TensorDescriptor(BUFFER, 0, offset, (raw.nbytes,))
    if _is_ordinary(attachment):
        return _describe_strided(layout, attachment)
    return _describe_unusual(layout, attachment)


def _is_ordinary(x: torch.Tensor) -> bool:
    return not x.is_nested and x.layout is torch.strided and x.is_cpu and not x.is_quantized


def _describe_strided(layout: Layout, x: torch.Tensor, device: str = "") -> TensorDescriptor:
    dtype = x.dtype
    code = _code(dtype)
    shape = tuple(x.shape)
    stride: tuple[int, ...] = ()
    # Strides say nothing about contiguity in dimensions of 0 or 1, but torch guesses memory formats from them.
    dense = x.is_contiguous()
    if not dense or 1 in shape or 0 in shape:
        dense = dense or _is_dense(shape, x.stride())
        stride = x.stride() if dense else ()
    nbytes = x.nbytes
    if not nbytes:
        return TensorDescriptor(STRIDED, code, 0, shape, stride, x.requires_grad, device)
    offset = layout.reserve(nbytes)
    if not device and not _has_contents(x):
        layout._copies.append(_Gather(offset, torch.zeros(shape, dtype=dtype), stride))
    elif not dense or device or x.is_neg() or (dtype.is_complex and x.is_conj()):
        layout._copies.append(_Gather(offset, x.detach(), stride))
    else:
        layout._moves.append((offset, x, nbytes))
    return TensorDescriptor(STRIDED, code, offset, shape, stride, x.requires_grad, device)


def _describe_unusual(layout: Layout, x: torch.Tensor) -> TensorDescriptor:
    if x.is_nested or (x.layout not in _COMPRESSED_FORM and x.layout not in (torch.strided, torch.sparse_coo)):
        kind = "a nested tensor" if x.is_nested else f"a tensor of layout {x.layout}"
        raise PayloadError(f"{kind} cannot be sent: send its parts, or convert it to a dense tensor first")
    code = _code(x.dtype)
    shape = tuple(x.shape)
    if x.is_meta:
        if x.layout is not torch.strided or x.is_quantized:
            raise PayloadError(
                f"a meta tensor of layout {x.layout} and {x.dtype} cannot be sent: send its shape and dtype instead"
            )
        return TensorDescriptor(META, code, 0, shape, x.stride(), x.requires_grad, "meta")
    device = "" if x.is_cpu else str(x.device)
    source = x.detach()
    if source.layout is torch.strided and not source.is_quantized:
        return _describe_strided(layout, x, device)
    source = source.cpu()
    parts: tuple[torch.Tensor, ...]
    detail: tuple[int | float, ...] = ()
    if source.is_quantized and source.qscheme() is torch.per_tensor_affine:
        form, parts = QUANTIZED, (source.int_repr(),)
        detail = (source.q_scale(), source.q_zero_point())
    elif source.is_quantized and source.qscheme() is torch.per_channel_affine:
        form = QUANTIZED_CHANNELS
        parts = (source.int_repr(), source.q_per_channel_scales(), source.q_per_channel_zero_points())
        detail = (source.q_per_channel_axis(),)
    elif source.is_quantized:
        raise PayloadError(f"a quantised tensor of scheme {source.qscheme()} cannot be sent: dequantise it first")
    elif source.layout is torch.sparse_coo:
        form, parts, detail = COO, (source._indices(), source._values()), (int(source.is_coalesced()),)
    else:
        form = _COMPRESSED_FORM[source.layout]
        by_row = form in (CSR, BSR)
        compressed = source.crow_indices() if by_row else source.ccol_indices()
        plain = source.col_indices() if by_row else source.row_indices()
        parts = (compressed, plain, source.values())
    described = tuple([_describe_strided(layout, part) for part in parts])
    return TensorDescriptor(form, code, 0, shape, (), x.requires_grad, device, described, detail)


def _shared_views(
    layout: Layout, attachments: Sequence[torch.Tensor | pickle.PickleBuffer]
) -> dict[int, TensorDescriptor]:
    """Descriptors, by index, of the attachments that ship as one span of the storage they have in common."""
    by_storage: dict[int, list[int]] = {}
    for index, x in enumerate(attachments):
        if not isinstance(x, torch.Tensor) or not _is_ordinary(x) or not x.numel() or x.is_neg() or x.is_conj():
            continue
        if _has_contents(x):
            by_storage.setdefault(x.untyped_storage().data_ptr(), []).append(index)
    shared: dict[int, TensorDescriptor] = {}
    if len(by_storage) == len(attachments):
        return shared
    for indices in by_storage.values():
        views = [x for x in map(attachments.__getitem__, indices) if isinstance(x, torch.Tensor)]
        if len(views) < 2 or any(x.requires_grad for x in views):
            continue
        first = min([int(x.storage_offset()) * x.itemsize for x in views]) // ALIGNMENT * ALIGNMENT
        last = max([(int(x.storage_offset()) + _extent(x.shape, x.stride())) * x.itemsize for x in views])
        if last - first > SPAN_FACTOR * sum(x.nbytes for x in views):
            continue
        offset = layout.reserve(last - first)
        layout._copies.append(_Span(offset, views[0].untyped_storage(), first, last - first))
        for index, x in zip(indices, views, strict=True):
            detail = (layout.size - offset, int(x.storage_offset()) - first // x.itemsize)
            shared[index] = TensorDescriptor(
                VIEW, _code(x.dtype), offset, tuple(x.shape), x.stride(), False, "", (), detail
            )
    return shared


def _as_plain(x: torch.Tensor) -> torch.Tensor:
    """The same tensor without its subclass, so that no ``__torch_function__`` or ``__torch_dispatch__`` sees us."""
    with _C.DisableTorchFunctionSubclass(), _C._DisableTorchDispatch():
        return x.as_subclass(torch.Tensor)


def _code(dtype: torch.dtype) -> int:
    code = _CODES.get(dtype)
    if code is None:
        raise PayloadError(f"a tensor of {dtype} cannot be sent: convert it to another dtype first")
    return code


def _has_contents(x: torch.Tensor) -> bool:
    """Whether the tensor has memory; False means that it is torch's shorthand for zeros."""
    try:
        if x.data_ptr():
            return True
        if x._is_zerotensor():
            return False
    except RuntimeError as error:  # a tensor inside vmap or another transform
        raise _no_contents(x) from error
    raise _no_contents(x)


def _no_contents(x: torch.Tensor) -> PayloadError:
    return PayloadError(
        f"a tensor of shape {tuple(x.shape)} and {x.dtype} has no memory of its own (a fake or wrapper tensor, "
        "one inside a function transform, or one whose storage was freed), so its contents cannot be sent"
    )


def _extent(shape: Sequence[int], stride: Sequence[int]) -> int:
    """How many elements of memory lie between the first and the last element, both included."""
    if 0 in shape:
        return 0
    return 1 + sum([(size - 1) * step for size, step in zip(shape, stride, strict=True)])


def _is_dense(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Whether the elements fill their extent without gap or overlap, in whatever order of dimensions."""
    expected = 1
    for step, size in sorted([(step, size) for size, step in zip(shape, stride, strict=True) if size != 1]):
        if step != expected:
            return False
        expected *= size
    return True


# ---- the receiver's side


class _Reader:
    """Reads attachments out of one region, and checks each claim of a descriptor before acting on it."""

    __slots__ = ("_bases", "_claimed", "_device_map", "_nbytes", "_view")

    def __init__(self, region: bytearray | memoryview, device_map: Mapping[str, str] | None) -> None:
        view = memoryview(region)
        if view.readonly:
            raise ValueError("the region must be writable: tensors made in it can be written to")
        self._view = view.cast("B") if view.format != "B" or view.ndim != 1 else view
        self._nbytes = view.nbytes
        self._device_map = device_map
        self._claimed = 0
        self._bases: dict[tuple[int, int], tuple[memoryview | bytearray, int, dict[torch.dtype, torch.Tensor]]] = {}

    def read(self, descriptor: TensorDescriptor) -> torch.Tensor | memoryview:
        form = descriptor.form
        if form == STRIDED:
            tensor = self._strided(descriptor)
        elif form == BUFFER:
            return self._buffer(descriptor)
        elif form == VIEW:
            tensor = self._shared(descriptor)
        elif form == META:
            _checked_extent(descriptor)
            shape, stride = descriptor.shape, descriptor.stride
            if len(stride) != len(shape):
                raise ProtocolError(f"a peer announces a meta tensor without strides: {descriptor}")
            tensor = torch.empty_strided(shape, stride, dtype=_dtype(descriptor), device="meta")
        else:
            tensor = self._composite(descriptor)
        if (descriptor.device or self._device_map) and form != META:
            tensor = self._on_device(tensor, descriptor.device or "cpu")
        if descriptor.requires_grad:
            if not (tensor.is_floating_point() or tensor.is_complex()) or form == VIEW:
                raise ProtocolError(f"a peer claims that a tensor which cannot require grad does: {descriptor}")
            tensor.requires_grad_()
        return tensor

    def _piece(self, offset: int, nbytes: int) -> tuple[memoryview | bytearray, int]:
        """The checked place of one attachment: a buffer, and an offset in it."""
        if offset < 0 or offset % ALIGNMENT or offset + nbytes > self._nbytes:
            raise ProtocolError(f"a peer places {nbytes} bytes at {offset} in a region of {self._nbytes} bytes")
        self._claimed += nbytes
        if self._claimed > self._nbytes:
            raise ProtocolError(f"a peer places attachments over each other in a region of {self._nbytes} bytes")
        if nbytes < SMALL_ATTACHMENT and self._nbytes > LARGE_REGION:
            return bytearray(self._view[offset : offset + nbytes]), 0
        return self._view, offset

    def _strided(self, descriptor: TensorDescriptor) -> torch.Tensor:
        dtype = _dtype(descriptor)
        shape, stride = descriptor.shape, descriptor.stride
        count = _checked_extent(descriptor)
        if count != math.prod(shape):
            raise ProtocolError(f"a peer announces a tensor with gaps or overlaps: {descriptor}")
        if not count:
            return torch.empty_strided(shape, stride, dtype=dtype) if stride else torch.empty(shape, dtype=dtype)
        buffer, offset = self._piece(descriptor.offset, count * dtype.itemsize)
        tensor = torch.frombuffer(buffer, dtype=dtype, count=count, offset=offset)
        # Changed in place, so that the result is no view: autograd treats views differently.
        if stride:
            return tensor.as_strided_(shape, stride)
        return tensor if len(shape) == 1 else tensor.resize_(shape)

    def _buffer(self, descriptor: TensorDescriptor) -> memoryview:
        count = _checked_extent(descriptor)
        if len(descriptor.shape) != 1 or descriptor.stride:
            raise ProtocolError(f"a peer announces a buffer that is not a row of bytes: {descriptor}")
        buffer, offset = self._piece(descriptor.offset, count)
        return memoryview(buffer)[offset : offset + count]

    def _shared(self, descriptor: TensorDescriptor) -> torch.Tensor:
        dtype = _dtype(descriptor)
        extent = _checked_extent(descriptor)
        nbytes, first = _integers(descriptor, 2)
        if nbytes <= 0 or nbytes % ALIGNMENT or first < 0 or (first + extent) * dtype.itemsize > nbytes:
            raise ProtocolError(f"a peer announces a view that reaches beyond its span: {descriptor}")
        if len(descriptor.stride) != len(descriptor.shape):
            raise ProtocolError(f"a peer announces a view without strides: {descriptor}")
        key = descriptor.offset, nbytes
        if key not in self._bases:
            self._bases[key] = (*self._piece(*key), {})
        buffer, offset, bases = self._bases[key]
        if dtype not in bases:
            # One base for each dtype: views of a base share its version counter, and a base of bytes could not carry
            # the history of an in-place operation on a float view.
            bases[dtype] = torch.frombuffer(buffer, dtype=dtype, count=nbytes // dtype.itemsize, offset=offset)
        return bases[dtype].as_strided(descriptor.shape, descriptor.stride, first)

    def _composite(self, descriptor: TensorDescriptor) -> torch.Tensor:
        form, shape = descriptor.form, descriptor.shape
        needed = {COO: 2, CSR: 3, CSC: 3, BSR: 3, BSC: 3, QUANTIZED: 1, QUANTIZED_CHANNELS: 3}.get(form)
        if needed is None:
            raise ProtocolError(f"a peer announces a tensor of unknown form {form}")
        if len(descriptor.parts) != needed or any(part.form != STRIDED for part in descriptor.parts):
            raise ProtocolError(f"a peer announces a tensor of form {form} without the {needed} parts that make it")
        _checked_extent(descriptor)
        parts = [self._strided(part) for part in descriptor.parts]
        try:
            if form == COO:
                indices, values = parts
                (coalesced,) = _integers(descriptor, 1)
                return torch.sparse_coo_tensor(
                    indices, values, shape, is_coalesced=bool(coalesced), check_invariants=True
                )
            if form == QUANTIZED:
                scale, zero_point = descriptor.detail
                return torch._make_per_tensor_quantized_tensor(parts[0], float(scale), int(zero_point))
            if form == QUANTIZED_CHANNELS:
                (axis,) = _integers(descriptor, 1)
                if not 0 <= axis < parts[0].dim() or any(p.shape != parts[0].shape[axis : axis + 1] for p in parts[1:]):
                    raise ProtocolError(f"a peer announces a quantised tensor whose channels do not fit: {descriptor}")
                integers, scales, zero_points = parts
                if scales.is_complex() or zero_points.is_complex() or scales.dtype == torch.bool:
                    raise ProtocolError(
                        f"a peer announces a quantised tensor whose scales are no numbers: {descriptor}"
                    )
                return torch._make_per_channel_quantized_tensor(integers, scales, zero_points, axis)
            compressed, plain, values = parts
            layout = _COMPRESSED[form]
            return torch.sparse_compressed_tensor(
                compressed, plain, values, shape, dtype=values.dtype, layout=layout, check_invariants=True
            )
        except (RuntimeError, TypeError, ValueError, OverflowError, IndexError) as error:
            if isinstance(error, ProtocolError):
                raise
            raise ProtocolError(f"the parts of a tensor do not fit together: {error}") from error

    def _on_device(self, tensor: torch.Tensor, device: str) -> torch.Tensor:
        target = self._device_map.get(device, device) if self._device_map else device
        if target == "cpu":
            return tensor
        try:
            return tensor.to(target)
        except (RuntimeError, AssertionError) as error:  # torch asserts where it was built without a backend
            raise PayloadError(
                f"a tensor was sent from device {device!r} and belongs on {target!r} here, but this worker cannot use "
                f"that device: {error}. Map it to another one with a device map, or send it from the CPU"
            ) from error


def _dtype(descriptor: TensorDescriptor) -> torch.dtype:
    code = descriptor.dtype
    if not 0 <= code < _CODES[torch.qint8]:  # a quantised tensor is known by its form; its dtype comes of its parts
        raise ProtocolError(f"a peer announces a tensor of form {descriptor.form} and unknown dtype {code}")
    dtype = _DTYPES[code]
    if dtype is None:
        raise PayloadError(
            f"a tensor of torch.{_DTYPE_NAMES[code]} came, but torch {torch.__version__} has no such dtype"
        )
    return dtype


def _checked_extent(descriptor: TensorDescriptor) -> int:
    """How many elements of memory the shape and strides span, once both are known to be sane.

    Sizes of 0 count as 1 in the bound, because torch multiplies the others even for an empty tensor.
    """
    shape, stride = descriptor.shape, descriptor.stride
    if len(shape) > MAX_DIMENSIONS:
        raise LimitExceeded(f"a peer announces a tensor of {len(shape)} dimensions; the limit is {MAX_DIMENSIONS}")
    bound = 16  # the largest element, so that byte counts fit too
    for size in shape:
        if size < 0:
            raise ProtocolError(f"a peer announces a tensor of negative size: {shape}")
        bound *= size or 1
    if bound > _INT64_MAX:
        raise LimitExceeded(f"a peer announces a tensor larger than any memory: {shape}")
    if not stride:
        return math.prod(shape)
    if len(stride) != len(shape) or min(stride) < 0 or max(stride) > _INT64_MAX:
        raise ProtocolError(f"a peer announces strides {stride} for a tensor of shape {shape}")
    extent = _extent(shape, stride)
    if extent * 16 > _INT64_MAX:
        raise LimitExceeded(f"a peer announces a tensor larger than any memory: {shape}, strides {stride}")
    return extent


def _integers(descriptor: TensorDescriptor, count: int) -> tuple[int, ...]:
    detail = descriptor.detail
    numbers = tuple([number for number in detail if isinstance(number, int)])
    if len(detail) != count or len(numbers) != count:
        raise ProtocolError(f"a peer announces a tensor of form {descriptor.form} with the details {detail}")
    return numbers
