"""How attachments get into the region, where that is not one copy of dense memory. For devices see `staging`."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import msgspec
import torch

from telegrad.errors import PayloadError
from telegrad.wire.descriptors import COPIED_AS_BYTES, extent_of

string_at: Callable[[int, int], bytes] = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t)(
    ("PyBytes_FromStringAndSize", ctypes.pythonapi)
)
"""Same as ctypes.string_at, without its Python wrapper."""
MAX_REPEATED = 64 * 1024
"""Bytes of an expanded tensor that are written in one piece. torch copies larger ones without one more copy."""


class SpanCopy(msgspec.Struct):
    """Copies the memory that overlapping tensors share."""

    offset: int
    address: int
    nbytes: int
    tensors: list[tuple[torch.Tensor, int]]  # each with its address

    def write(self, region: memoryview) -> None:
        for x, address in self.tensors:
            needed = (int(x.storage_offset()) + extent_of(x.shape, x.stride())) * x.itemsize
            if x.data_ptr() != address or x.untyped_storage().nbytes() < needed:
                raise PayloadError("the storage of a tensor was freed or shrunk while the tensor was being sent")
        target = ctypes.addressof(ctypes.c_char.from_buffer(region, self.offset))
        ctypes.memmove(target, self.address, self.nbytes)


class ElementCopy(msgspec.Struct):
    """Copies a tensor element by element. torch resolves gaps and conjugation."""

    offset: int
    source: torch.Tensor
    stride: tuple[int, ...]  # on the receiver

    def write(self, region: memoryview) -> None:
        source, dtype = self.source, self.source.dtype
        if dtype in COPIED_AS_BYTES:
            source, dtype = source.view(torch.uint8), torch.uint8
        target = torch.frombuffer(region, dtype=dtype, count=source.numel(), offset=self.offset)
        target = target.as_strided_(source.shape, self.stride) if self.stride else target.resize_(source.shape)
        target.copy_(source)


class BufferCopy(msgspec.Struct):
    """Copies a buffer that is not a tensor."""

    offset: int
    source: memoryview

    def write(self, region: memoryview) -> None:
        region.cast("B")[self.offset : self.offset + self.source.nbytes] = self.source


def period_of(shape: tuple[int, ...], stride: tuple[int, ...], itemsize: int) -> int:
    """Return how many bytes an expanded tensor repeats, as the gradient of a sum does; 0 if it is anything else.

    >>> [period_of((4, 3), stride, 8) for stride in ((0, 1), (0, 0), (1, 0), (1, 4))]
    [24, 8, 0, 0]
    """
    count, repeats = 1, False
    for size, step in zip(reversed(shape), reversed(stride), strict=True):
        if size != 1:
            if step == 0:
                repeats = True
            elif repeats or step != count:
                return 0
            else:
                count *= size
    return count * itemsize if repeats else 0


def repeated(address: int, nbytes: int, period: int) -> bytes:
    """Return as many bytes, which repeat those at an address."""
    return string_at(address, period) * (nbytes // period)
