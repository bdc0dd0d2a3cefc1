"""The memory of the large tensors that this worker has received and that still exists.

Torch did not allocate it, so it cannot tell whether anything else refers to it. Telegrad knows: nothing does. A
function that returns a tensor that it got, or its gradient, returns a tensor with such memory.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from functools import partial

import torch

from telegrad.torch_private_ownership import is_only_access
from telegrad.wire.in_place import SMALLEST


class ReceivedTensors:
    """Recognizes the memory of received tensors, without keeping it alive."""

    def __init__(self) -> None:
        # Storages and not tensors: a program may give a tensor other memory, and may not swap one with weak references.
        # By id, since hashing calls a Python function. An entry is removed when its storage is collected, and before
        # another object can get the id: by functions in C, because an interrupt in one in Python would be lost.
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def add(self, attachments: Iterable[object]) -> None:
        """Note the memory of the large ones among the tensors of a message."""
        for tensor in attachments:
            if type(tensor) is not torch.Tensor or not tensor.is_cpu or tensor.layout is not torch.strided:
                continue  # others have no storage, and sparse ones do not know their bytes
            if tensor.nbytes >= SMALLEST:
                storage = tensor.untyped_storage()
                self._storages[id(storage)] = weakref.ref(storage, partial(self._storages.pop, id(storage)))

    def is_only_access(self, tensor: torch.Tensor) -> bool:
        """Return whether the memory of a tensor that nobody else holds can be reached through the tensor alone."""
        return is_only_access(tensor, received=id(tensor.untyped_storage()) in self._storages)

    def __len__(self) -> int:
        return len(self._storages)
