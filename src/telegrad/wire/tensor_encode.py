"""Encode attachments on the sender: describe them, assign each an offset in a region, and copy them there."""

from __future__ import annotations

import ctypes
import pickle
from collections.abc import Mapping, Sequence
from operator import lt
from typing import Any

import torch

from telegrad.errors import PayloadError
from telegrad.torch_private import (
    coo_indices,
    coo_values,
    forward_ad_level,
    is_functorch_wrapped,
    no_torch_dispatch,
    no_torch_function,
    without_dead_wrapper,
)
from telegrad.wire.contents import has_contents, no_contents
from telegrad.wire.descriptors import (
    ALIGNMENT,
    BSR,
    BUFFER,
    CODES,
    COMPRESSED_FORM,
    CONJUGATED,
    COO,
    COPIED_AS_BYTES,
    CSR,
    DIRECT,
    META,
    NEGATED,
    PLAIN_CODES,
    QUANTIZED,
    QUANTIZED_CHANNELS,
    STRIDED,
    VIEW,
    TensorDescriptor,
    code_of,
    extent_of,
)
from telegrad.wire.devices import SAME_DEVICE, DirectPath, Targets
from telegrad.wire.overlap import Piece, overlapping, relations
from telegrad.wire.region_copies import MAX_REPEATED, BufferCopy, ElementCopy, SpanCopy, period_of, repeated, string_at
from telegrad.wire.staging import DeviceCopy, copy_to_host, memory_of
from telegrad.wire.subclasses import check_not_dual
from telegrad.wire.torch_state import can_read_tensors, default_torch_state

_STRIDED_LAYOUT = torch.strided
_UNINTERCEPTED = (torch.Tensor, torch.nn.Parameter)  # types whose methods user code cannot override


class RegionLayout:
    """The offsets of all attachments in a region of ``size`` bytes. ``write`` and ``copy`` copy their contents."""

    __slots__ = ("_dense", "_on_devices", "_others", "_readable", "descriptors", "size")

    def __init__(self) -> None:
        self.descriptors: tuple[TensorDescriptor, ...] = ()
        self.size = 0
        self._dense: list[tuple[int, torch.Tensor, int, int]] = []  # offset, dense tensor, bytes, repeated bytes
        self._others: list[SpanCopy | ElementCopy | BufferCopy] = []  # all other attachments in host memory
        self._on_devices: list[DeviceCopy] = []
        self._readable = can_read_tensors()  # whoever describes the attachments copies them, in the same state

    def reserve(self, nbytes: int) -> int:
        """Reserve the next ``nbytes`` of the region and return their offset."""
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
        if view.format != "B":
            view = view.cast("B")
        if view.nbytes < self.size:
            raise ValueError(f"the region has {view.nbytes} bytes, but the layout needs {self.size}")
        if self._readable:
            self._write(view)
        else:
            with default_torch_state():
                self._write(view)

    def copy(self) -> bytes | None:
        """Return the bytes that `write` would write, if every attachment is one dense tensor, else None.

        For small regions, two copies take less time than `write`.
        """
        if self._others or self._on_devices or not self._readable:
            return None
        parts = []
        for _, tensor, nbytes, period in self._dense:
            address = tensor.data_ptr()
            if not address:
                raise no_contents(tensor)
            parts.append(string_at(address, nbytes) if period == nbytes else repeated(address, nbytes, period))
            if nbytes % ALIGNMENT:
                parts.append(bytes(-nbytes % ALIGNMENT))
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def dense(self) -> list[tuple[int, torch.Tensor, int]]:
        """Return offset, tensor and bytes of all attachments, if all are dense tensors in host memory, else nothing."""
        if self._others or self._on_devices or any(period != nbytes for _, _, nbytes, period in self._dense):
            return []
        return [(offset, tensor, nbytes) for offset, tensor, nbytes, _ in self._dense]

    def _write(self, view: memoryview) -> None:
        if self._on_devices:  # pragma: no cover - needs a device
            copy_to_host(self._on_devices, view)
        start = ctypes.addressof(ctypes.c_char.from_buffer(view)) if self._dense else 0
        for offset, tensor, nbytes, period in self._dense:
            address = tensor.data_ptr()
            if not address:
                raise no_contents(tensor)
            source = address if period == nbytes else repeated(address, nbytes, period)
            ctypes.memmove(start + offset, source, nbytes)
        for copy in self._others:
            copy.write(view)


def encode_tensors(
    attachments: Sequence[torch.Tensor | pickle.PickleBuffer], *, share: bool = True, placement: Targets = SAME_DEVICE
) -> RegionLayout:
    """Describe the attachments and assign each an offset in a region.

    Tensors that overlap in memory also overlap on the receiver, unless `share` is false. `placement` says to which
    devices of the receiver they go.
    """
    layout = RegionLayout()
    if attachments:
        if forward_ad_level() >= 0:
            for attachment in attachments:
                if isinstance(attachment, torch.Tensor):
                    check_not_dual(attachment)
        if layout._readable:
            if placement.moves_cpu or not _describe_plain(layout, attachments, share):
                _describe_all(layout, attachments, share, placement)
        else:
            with default_torch_state():
                _describe_all(layout, attachments, share, placement)
    return layout


def _describe_plain(layout: RegionLayout, attachments: Sequence[Any], share: bool) -> bool:
    """Describe contiguous and small expanded CPU tensors, the common cases. Return False, without changes, if one is
    anything else.

    The result is the same as that of `_describe_all`, only faster.
    """
    descriptors, dense, starts, ends = [], [], [], []
    several = share and len(attachments) > 1
    shape: tuple[int, ...] = (-1,)
    dtype, code, nbytes, taken, size = torch.bool, 0, 0, 0, 0
    for x in attachments:
        if type(x) not in _UNINTERCEPTED or x.layout is not _STRIDED_LAYOUT or not x.is_cpu or x.is_nested:
            return False
        if x.dtype is not dtype or x.shape != shape:  # else as the one before
            dtype, shape, nbytes = x.dtype, tuple(x.shape), x.nbytes
            code, taken = PLAIN_CODES.get(dtype, -1), (nbytes + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
            if code < 0 or not nbytes:
                return False
        contiguous = x.is_contiguous()
        period = nbytes if contiguous else period_of(shape, x.stride(), x.itemsize) if nbytes <= MAX_REPEATED else 0
        if not period or x.is_neg():
            return False
        try:
            address = x.data_ptr()
        except RuntimeError:  # a tensor without memory of its own
            return False
        if not address:
            return False
        if several:
            starts.append(address)
            ends.append(address + period)
        stride = x.stride() if contiguous and 1 in shape else ()
        descriptors.append(TensorDescriptor(STRIDED, code, size, shape, stride, x.requires_grad))
        dense.append((size, x, nbytes, period))
        size += taken
    if several:
        # They overlap if one starts before as many have ended as have started before it.
        starts.sort()
        ends.sort()
        if any(map(lt, starts[1:], ends)):
            return False
    layout.descriptors, layout.size, layout._dense = tuple(descriptors), size, dense
    return True


def _describe_all(
    layout: RegionLayout,
    attachments: Sequence[torch.Tensor | pickle.PickleBuffer],
    share: bool,
    placement: Targets,
) -> None:
    for a in attachments:
        if isinstance(a, torch.Tensor) and is_functorch_wrapped(without_dead_wrapper(a)):
            raise no_contents(a)
    plain = [
        a if type(a) in _UNINTERCEPTED or isinstance(a, pickle.PickleBuffer) else _as_plain(a) for a in attachments
    ]
    on_cpu = not placement.moves_cpu
    for a in plain:
        on_cpu = on_cpu and (isinstance(a, pickle.PickleBuffer) or a.is_cpu)
    targets = [""] * len(plain) if on_cpu else placement.targets(plain)
    shared = _shared_views(layout, plain, targets) if share and len(plain) > 1 else {}
    layout.descriptors = tuple(
        [
            shared.get(index) or _describe(layout, attachment, target, placement.direct)
            for index, (attachment, target) in enumerate(zip(plain, targets, strict=True))
        ]
    )


def _describe(
    layout: RegionLayout,
    attachment: torch.Tensor | pickle.PickleBuffer,
    target: str,
    direct: DirectPath | None = None,
) -> TensorDescriptor:
    if isinstance(attachment, pickle.PickleBuffer):
        raw = attachment.raw()
        offset = layout.reserve(raw.nbytes)
        layout._others.append(BufferCopy(offset, raw))
        return TensorDescriptor(BUFFER, 0, offset, (raw.nbytes,))
    kind = attachment.device.type
    if direct is not None and direct.kind == kind == target.partition(":")[0]:  # pragma: no cover - needs a device
        return _describe_direct(layout, attachment, target, direct)
    if _is_ordinary(attachment):
        return _describe_strided(layout, attachment, target)
    return _describe_unusual(layout, attachment, target)


def _is_ordinary(x: torch.Tensor) -> bool:
    return not x.is_nested and x.layout is torch.strided and not x.is_meta and not x.is_quantized


def _describe_strided(layout: RegionLayout, x: torch.Tensor, target: str = "") -> TensorDescriptor:
    """Describe a tensor that goes to the device `target` of the receiver."""
    dtype = x.dtype
    code = code_of(dtype)
    shape = tuple(x.shape)
    stride: tuple[int, ...] = ()
    # Strides of dimensions of size 0 or 1 do not affect contiguity, but torch infers memory formats from them.
    dense = x.is_contiguous()
    if not dense or 1 in shape or 0 in shape:
        dense = dense or _is_dense(shape, x.stride())
        stride = x.stride() if dense else ()
    nbytes = x.nbytes
    if not nbytes:
        return TensorDescriptor(STRIDED, code, 0, shape, stride, x.requires_grad, target)
    offset = layout.reserve(nbytes)
    if not has_contents(x):
        layout._others.append(ElementCopy(offset, torch.zeros(shape, dtype=dtype), stride))
    elif not x.is_cpu:  # pragma: no cover - needs a device
        source = x.detach().view(torch.uint8) if dtype in COPIED_AS_BYTES else x.detach()
        layout._on_devices.append(DeviceCopy(offset, source, stride))
    elif not dense or x.is_neg() or (dtype.is_complex and x.is_conj()):
        layout._others.append(ElementCopy(offset, x.detach(), stride))
    else:
        layout._dense.append((offset, x, nbytes, nbytes))
    return TensorDescriptor(STRIDED, code, offset, shape, stride, x.requires_grad, target)


def _describe_direct(  # pragma: no cover - needs a device
    layout: RegionLayout, x: torch.Tensor, target: str, direct: DirectPath
) -> TensorDescriptor:
    if not _is_ordinary(x) or not x.numel():
        return (_describe_strided if _is_ordinary(x) else _describe_unusual)(layout, x, target)
    handle = pickle.PickleBuffer(direct.share(x.detach()))
    part = _describe(layout, handle, "")
    return TensorDescriptor(DIRECT, code_of(x.dtype), 0, tuple(x.shape), (), x.requires_grad, target, (part,))


def _describe_unusual(layout: RegionLayout, x: torch.Tensor, target: str) -> TensorDescriptor:
    if x.is_nested or (x.layout not in COMPRESSED_FORM and x.layout not in (torch.strided, torch.sparse_coo)):
        kind = "a nested tensor" if x.is_nested else f"a tensor of layout {x.layout}"
        raise PayloadError(f"{kind} cannot be sent: send its parts, or convert it to a dense tensor first")
    code = code_of(x.dtype)
    shape = tuple(x.shape)
    if x.is_meta:
        if x.layout is not torch.strided or x.is_quantized:
            raise PayloadError(
                f"a meta tensor of layout {x.layout} and {x.dtype} cannot be sent: send its shape and dtype instead"
            )
        return TensorDescriptor(META, code, 0, shape, x.stride(), x.requires_grad, "meta")
    source = x.detach().cpu()
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
        form, parts, detail = COO, (coo_indices(source), coo_values(source)), (int(source.is_coalesced()),)
    else:
        form = COMPRESSED_FORM[source.layout]
        by_row = form in (CSR, BSR)
        compressed = source.crow_indices() if by_row else source.ccol_indices()
        plain = source.col_indices() if by_row else source.row_indices()
        parts = (compressed, plain, source.values())
    described = tuple([_describe_strided(layout, part) for part in parts])
    return TensorDescriptor(form, code, 0, shape, (), x.requires_grad, target, described, detail)


def _shared_views(
    layout: RegionLayout, attachments: Sequence[torch.Tensor | pickle.PickleBuffer], targets: Sequence[str]
) -> dict[int, TensorDescriptor]:
    """Return the descriptors of overlapping tensors by index. Each group is sent as the memory that it spans."""
    tensors: dict[int, torch.Tensor] = {}
    pieces: dict[torch.device, list[Piece]] = {}
    for index, x in enumerate(attachments):
        if isinstance(x, torch.Tensor) and _is_ordinary(x) and x.numel() and x.dtype in CODES and has_contents(x):
            address = x.data_ptr()
            if not address % x.itemsize:  # memory from outside torch may be unaligned
                piece = address, address + extent_of(x.shape, x.stride()) * x.itemsize, index
                pieces.setdefault(x.device, []).append(piece)
                tensors[index] = x
    shared: dict[int, TensorDescriptor] = {}
    for on_device in pieces.values():
        for group in overlapping(on_device, tensors) if len(on_device) > 1 else ():
            _describe_group(layout, group, tensors, targets, shared)
    return shared


def _describe_group(
    layout: RegionLayout,
    group: Sequence[Piece],
    tensors: Mapping[int, torch.Tensor],
    targets: Sequence[str],
    shared: dict[int, TensorDescriptor],
) -> None:
    """Describe tensors of one device that overlap."""
    views = [tensors[index] for _, _, index in group]
    first, last = group[0][0], max([end for _, end, _ in group])
    skipped = first % ALIGNMENT  # keeps every element at a multiple of its size
    offset = layout.reserve(skipped + last - first)
    if views[0].is_cpu:  # pragma: no branch - the other one needs a device
        addresses = [address for address, _, _ in group]
        layout._others.append(SpanCopy(offset + skipped, first, last - first, list(zip(views, addresses, strict=True))))
    else:  # pragma: no cover - needs a device
        layout._on_devices.append(DeviceCopy(offset + skipped, memory_of(views[0], first, last - first), ()))
    for (address, _, index), x, relation in zip(group, views, relations(views), strict=True):
        start = (skipped + address - first) // x.itemsize
        interpretation = CONJUGATED * x.is_conj() + NEGATED * x.is_neg()
        shared[index] = TensorDescriptor(
            VIEW,
            code_of(x.dtype),
            offset,
            tuple(x.shape),
            x.stride(),
            x.requires_grad,
            targets[index],
            (),
            (layout.size - offset, start, relation, interpretation),
        )


def _as_plain(x: torch.Tensor) -> torch.Tensor:
    """Return the tensor without its subclass, so no ``__torch_function__`` or ``__torch_dispatch__`` is called."""
    with no_torch_function(), no_torch_dispatch():
        return x.as_subclass(torch.Tensor)


def _is_dense(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Whether the elements fill their extent without gaps or overlap, in any order of dimensions."""
    expected = 1
    for step, size in sorted([(step, size) for size, step in zip(shape, stride, strict=True) if size != 1]):
        if step != expected:
            return False
        expected *= size
    return True
