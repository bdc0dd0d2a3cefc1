"""Send tensors from where they are, without a snapshot, if nobody else can change them.

The frames of a large message then refer to the memory of its tensors, and keep it alive until the peer has acknowledged
them. Only chunks that hold other bytes as well (the pickled value, a small tensor) are copied.
"""

from __future__ import annotations

import ctypes
import functools
import pickle
from collections.abc import Callable, Sequence
from typing import Any
from weakref import getweakrefcount

import torch

from telegrad.wire.frames import CHUNK, aligned, next_chunk
from telegrad.wire.tensor_encode import RegionLayout

SMALLEST = 2 * CHUNK
"""Smaller tensors are copied: it takes less time than to find out who holds them and to hold their memory."""


def may_stay_in_place(tensors: Sequence[object]) -> bool:
    """Return whether these are all strided tensors in host memory without weak references, and one of them is large."""
    large = False
    for tensor in tensors:
        if type(tensor) is not torch.Tensor or not tensor.is_cpu or tensor.layout is not torch.strided:
            return False
        if getweakrefcount(tensor):  # whoever has one may get the tensor at any time
            return False
        large = large or tensor.nbytes >= SMALLEST
    return large


@functools.lru_cache(64)
def _block_type(size: int) -> Any:
    """Return an array type whose instances can hold what owns their memory. Cached, because making a type is slow."""
    return type("InPlace", (ctypes.c_ubyte * size,), {})


def memory_of(tensor: torch.Tensor, nbytes: int) -> memoryview:
    """Return the memory of a dense tensor. The view keeps it alive, but not the tensor and its graph."""
    block = _block_type(nbytes).from_address(tensor.data_ptr())
    block.storage = tensor.untyped_storage()
    return pickle.PickleBuffer(block).raw()


class InPlaceRegion:
    """The contents of a message whose tensors are dense, some of which need no copy. It is a `RegionSource`."""

    __slots__ = ("_allocate", "_dense", "_layout", "_views", "size")

    def __init__(
        self,
        layout: RegionLayout,
        dense: Sequence[tuple[int, torch.Tensor, int]],
        owned: set[int],
        allocate: Callable[[int], memoryview],
    ) -> None:
        self.size = layout.size
        self._allocate = allocate
        self._layout = layout
        self._dense = dense
        self._views = [
            (offset, memory_of(tensor, nbytes))
            for index, (offset, tensor, nbytes) in enumerate(dense)
            if index in owned
        ]

    def write(self, view: memoryview, /) -> None:
        """Copy everything, for a way that needs it in other memory."""
        self._layout.write(view)

    def copy(self) -> bytes | None:
        """Return None: a region with tensors in place is large."""
        return None

    def chunks(self, data: bytes) -> list[memoryview]:
        """Return the bodies of the chunks that carry `data` and the region. Those that are copied share a buffer."""
        start = aligned(len(data))
        bodies: list[memoryview | None] = []
        sizes: list[int] = []
        offset, end, copied = 0, start + self.size, 0
        while offset < end:
            size = next_chunk(end - offset)
            bodies.append(self._in_place(offset - start, size))
            sizes.append(size)
            copied += size if bodies[-1] is None else 0
            offset += size
        buffer = self._allocate(copied) if copied else memoryview(b"")
        found: list[memoryview] = []
        offset = used = 0
        for body, size in zip(bodies, sizes, strict=True):
            if body is None:
                body = buffer[used : used + size]
                used += size
                self._fill(body, data, offset, start)
            found.append(body)
            offset += size
        return found

    def _in_place(self, begin: int, size: int) -> memoryview | None:
        for offset, view in self._views:
            if offset <= begin and begin + size <= offset + len(view):
                return view[begin - offset : begin - offset + size]
        return None

    def _fill(self, body: memoryview, data: bytes, begin: int, start: int) -> None:
        """Copy what belongs into the chunk that begins at `begin`. The region begins at `start`."""
        part = data[begin : begin + len(body)]
        body[: len(part)] = part
        target = ctypes.addressof(ctypes.c_char.from_buffer(body))
        end = begin + len(body)
        for offset, tensor, nbytes in self._dense:
            first, last = max(begin, start + offset), min(end, start + offset + nbytes)
            if first < last:
                source = tensor.data_ptr() + first - start - offset
                ctypes.memmove(target + first - begin, source, last - first)


def in_place(
    layout: RegionLayout, is_owned: Callable[[torch.Tensor], bool], allocate: Callable[[int], memoryview]
) -> RegionLayout | InPlaceRegion:
    """Return a region that leaves the tensors in place of which `is_owned` says that nobody else can change them.

    `allocate` returns the memory for what is copied. A message in shared memory is copied: use the layout itself.
    """
    dense = layout.dense()
    owned = {index for index, (_, tensor, nbytes) in enumerate(dense) if nbytes >= SMALLEST and is_owned(tensor)}
    return InPlaceRegion(layout, dense, owned, allocate) if owned else layout
