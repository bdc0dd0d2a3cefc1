"""Restore overlapping tensors: they share one span of memory, and autograd relates them as on the sender.

If one of them is the *root* of the others, these become views of it, so in-place operations are recorded as on the
sender. Otherwise all are views of a hidden tensor that covers the span. In both cases they share one version counter:
autograd notices when a change to one invalidates what another has saved.
"""

from __future__ import annotations

import torch

from telegrad.errors import ProtocolError
from telegrad.wire.descriptors import DETACHED, ROOT, UNRELATED, VIEW_OF_ROOT, TensorDescriptor, extent_of
from telegrad.wire.staging import ToDevices


class SharedSpan:
    """A span of a region, and the tensors in it."""

    __slots__ = ("_bases", "_buffer", "_device", "_dtypes", "_nbytes", "_offset", "_on_device", "_root", "_root_start")

    def __init__(
        self, buffer: memoryview | bytearray, offset: int, nbytes: int, device: str, to_devices: ToDevices
    ) -> None:
        self._buffer, self._offset, self._nbytes = buffer, offset, nbytes
        self._device = device
        self._on_device: torch.Tensor | None = None
        if device:  # pragma: no cover - needs a device
            self._on_device = to_devices.copy(self._frombuffer(torch.uint8, 0, nbytes), device)
        self._dtypes: list[torch.dtype] = []
        self._bases: dict[torch.dtype, torch.Tensor] = {}
        self._root: torch.Tensor | None = None
        self._root_start = 0

    def declare(self, descriptor: TensorDescriptor, dtype: torch.dtype, start: int, relation: int) -> None:
        """Add a tensor whose position was checked. All are declared before the first is created."""
        if descriptor.device != self._device:
            raise ProtocolError(f"a peer announces overlapping tensors on two devices: {descriptor}")
        if relation == ROOT:
            count = extent_of(descriptor.shape, descriptor.stride)
            if self._root is not None:
                raise ProtocolError(f"a peer announces two root tensors in one span: {descriptor}")
            self._root = self._frombuffer(dtype, start, count).as_strided_(descriptor.shape, descriptor.stride)
            self._root_start = start
        elif relation == UNRELATED:
            self._dtypes.append(dtype)
        elif relation not in (VIEW_OF_ROOT, DETACHED):
            raise ProtocolError(f"a peer announces a view of unknown relation: {descriptor}")

    def create(self, descriptor: TensorDescriptor, dtype: torch.dtype, start: int, relation: int) -> torch.Tensor:
        """Return the tensor that was declared with these arguments."""
        if relation == UNRELATED:
            return self._base(dtype).as_strided(descriptor.shape, descriptor.stride, start)
        root = self._root
        if root is None or dtype is not root.dtype:
            raise ProtocolError(f"a peer announces a view without its base: {descriptor}")
        if relation == ROOT:
            return root
        start -= self._root_start
        if start < 0 or start + extent_of(descriptor.shape, descriptor.stride) > extent_of(root.shape, root.stride()):
            raise ProtocolError(f"a peer announces a view that reaches beyond its base: {descriptor}")
        if relation == DETACHED:
            root = root.detach()
        return root.as_strided(descriptor.shape, descriptor.stride, start)

    def _base(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the tensor of this dtype that covers the span. All of them share a version counter."""
        if dtype in self._bases:
            return self._bases[dtype]
        if not self._bases:
            # A complex one first: autograd supports real views of a complex tensor.
            first = next((found for found in self._dtypes if found.is_complex), dtype)
            self._bases[first] = self._frombuffer(first, 0, self._nbytes // first.itemsize)
            return self._base(dtype)
        for other, base in self._bases.items():
            if other.is_complex and other.to_real() is dtype:
                made = torch.view_as_real(base).view(-1)
                break
        else:
            # A base of another dtype could not carry the history of an in-place operation on views of this one.
            made = next(iter(self._bases.values())).detach().view(dtype)
        self._bases[dtype] = made
        return made

    def _frombuffer(self, dtype: torch.dtype, start: int, count: int) -> torch.Tensor:
        if self._on_device is not None:  # pragma: no cover - needs a device
            made = torch.empty(0, dtype=dtype, device=self._on_device.device)
            made.set_(self._on_device.untyped_storage(), start, (count,))  # type: ignore[call-overload]  # see staging
            return made
        offset = self._offset + start * dtype.itemsize
        return torch.frombuffer(self._buffer, dtype=dtype, count=count, offset=offset)
