"""Paths from a device of one process to a device of another on the same host, without a copy through host memory.

There is one, for CUDA, on torch's own functions for sharing tensors between processes. No machine that telegrad is
tested on has such a device, so it is switched off unless `Options.direct_devices` is set.
"""

from __future__ import annotations

import pickle

import torch

from telegrad.settings import AgentSettings
from telegrad.wire.devices import DirectPath


class CudaHandles:
    """CUDA's memory handles. Torch keeps the memory until the process that opened the handle needs it no more."""

    kind = "cuda"

    def share(self, x: torch.Tensor) -> bytes:
        """Return a handle of a copy of the tensor: its owner may change the tensor at once."""
        from torch.multiprocessing.reductions import reduce_tensor  # here, because few agents need it

        _, arguments = reduce_tensor(x.detach().clone())  # type: ignore[no-untyped-call]  # torch has no types for it
        return pickle.dumps(arguments)

    def open(self, handle: bytes) -> torch.Tensor:
        """Return the tensor of a handle. Whoever sends one may run code here, as with any call."""
        from torch.multiprocessing.reductions import rebuild_cuda_tensor  # as above

        opened: torch.Tensor = rebuild_cuda_tensor(*pickle.loads(handle))  # type: ignore[no-untyped-call]  # as above
        return opened


def find_direct_path(settings: AgentSettings) -> DirectPath | None:
    """Return the path that an agent uses. In registered mode there is none: opening a handle trusts its sender."""
    if not settings.direct_devices or settings.accept == "registered" or not torch.cuda.is_available():
        return None
    return CudaHandles()
