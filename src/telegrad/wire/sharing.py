"""The receiver's side of tensors that overlap: they lie in one span of memory, and autograd relates them as it did.

Where one of them is the *root* of all others, these are made as views of it, so in-place operations are recorded as in
the sender's process. Otherwise all are views of a tensor that covers the span and that nobody else holds. Either way
they have one version counter: autograd notices when one changes what another has saved.
"""

from __future__ import annotations

import torch

from telegrad.errors import ProtocolError
from telegrad.wire.descriptors import DETACHED, ROOT, UNRELATED, VIEW_OF_ROOT, TensorDescriptor, extent_of


class SharedSpan:
    """One span of a region, and the tensors in it."""

    __slots__ = ("_bases", "_buffer", "_dtypes", "_nbytes", "_offset", "_place", "_root")

    def __init__(self, buffer: memoryview | bytearray, offset: int, nbytes: int) -> None:
        self._buffer, self._offset, self._nbytes = buffer, offset, nbytes
        self._dtypes: list[torch.dtype] = []
        self._bases: dict[torch.dtype, torch.Tensor] = {}
        self._root: torch.Tensor | None = None
        self._place = 0

    def announce(self, descriptor: TensorDescriptor, dtype: torch.dtype, place: int, relation: int) -> None:
        """A tensor in this span whose place has been checked. All are announced before the first is made."""
        if relation == ROOT:
            count = extent_of(descriptor.shape, descriptor.stride)
            if self._root is not None:
                raise ProtocolError(f"a peer announces two tensors that others are views of: {descriptor}")
            self._root = self._frombuffer(dtype, place, count).as_strided_(descriptor.shape, descriptor.stride)
            self._place = place
        elif relation == UNRELATED:
            self._dtypes.append(dtype)
        elif relation not in (VIEW_OF_ROOT, DETACHED):
            raise ProtocolError(f"a peer announces a view of unknown relation: {descriptor}")

    def make(self, descriptor: TensorDescriptor, dtype: torch.dtype, place: int, relation: int) -> torch.Tensor:
        """The tensor that was announced with these."""
        if relation == UNRELATED:
            return self._base(dtype).as_strided(descriptor.shape, descriptor.stride, place)
        root = self._root
        if root is None or dtype is not root.dtype:
            raise ProtocolError(f"a peer announces a view without the tensor that it is one of: {descriptor}")
        if relation == ROOT:
            return root
        place -= self._place
        if place < 0 or place + extent_of(descriptor.shape, descriptor.stride) > extent_of(root.shape, root.stride()):
            raise ProtocolError(f"a peer announces a view that reaches beyond its base: {descriptor}")
        if relation == DETACHED:
            root = root.detach()
        return root.as_strided(descriptor.shape, descriptor.stride, place)

    def _base(self, dtype: torch.dtype) -> torch.Tensor:
        """What covers the span, as elements of this dtype; all of them share a version counter."""
        if dtype in self._bases:
            return self._bases[dtype]
        if not self._bases:
            # A complex one first: its real form is a view of it that autograd knows.
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

    def _frombuffer(self, dtype: torch.dtype, place: int, count: int) -> torch.Tensor:
        offset = self._offset + place * dtype.itemsize
        return torch.frombuffer(self._buffer, dtype=dtype, count=count, offset=offset)
