"""The large tensors that this worker has received and that still exist.

Torch did not allocate their memory, so it cannot tell whether anything else refers to it. Telegrad knows: nothing does.
A function that returns a tensor that it got, or its gradient, returns such a tensor.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from functools import partial

import torch

from telegrad.torch_private_ownership import is_only_access
from telegrad.wire.in_place import SMALLEST


class ReceivedTensors:
    """Recognizes received tensors, without keeping them alive."""

    def __init__(self) -> None:
        # By id, since hashing a tensor calls a Python function. An entry is removed when its tensor is collected, and
        # before another object can get the id: by functions in C, because an interrupt in one in Python would be lost.
        self._tensors: dict[int, weakref.ref[torch.Tensor]] = {}

    def add(self, attachments: Iterable[object]) -> None:
        """Note the large ones among the tensors of a message."""
        for tensor in attachments:
            if type(tensor) is torch.Tensor and tensor.is_cpu and tensor.nbytes >= SMALLEST:
                self._tensors[id(tensor)] = weakref.ref(tensor, partial(self._tensors.pop, id(tensor)))

    def is_only_access(self, tensor: torch.Tensor) -> bool:
        """Return whether the memory of a tensor that nobody else holds can be reached through the tensor alone."""
        reference = self._tensors.get(id(tensor))
        received = reference is not None and reference() is tensor
        return is_only_access(tensor, int(received), received=received)

    def __len__(self) -> int:
        return len(self._tensors)
