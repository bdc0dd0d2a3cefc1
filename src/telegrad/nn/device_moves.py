"""Moves and casts of a module on another worker: ``to``, ``cuda``, ``half`` and the like."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import torch

from telegrad.backward.graph_breaks import keep_uncompiled
from telegrad.nn import remote_ops
from telegrad.nn.module_handle import ModuleHandle
from telegrad.nn.unsupported import raise_unsupported

_DTYPES = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
)


class MovableModule(ModuleHandle):
    """A handle that moves its module between the devices of its worker, and casts it."""

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Move the module to another device of its worker, or cast it, with the arguments of ``nn.Module.to``."""
        device = kwargs.get("device", args[0] if args else None)
        if isinstance(device, torch.Tensor):
            args, device = (device.device, device.dtype, *args[1:]), device.device
        if isinstance(device, int) and not isinstance(device, bool):
            device = torch.device(device)
        target = str(torch.device(device)) if isinstance(device, str | torch.device) else self.device
        self._run(remote_ops.to, args, kwargs, target)
        self.__dict__["device"] = target
        return self

    def to_empty(self, *, device: str | torch.device | int | None, recurse: bool = True) -> Self:
        """Move the module to another device of its worker without copying its values."""
        target = str(torch.device(device)) if device is not None else self.device
        self._run(remote_ops.to_empty, target, recurse)
        self.__dict__["device"] = target
        return self

    def cpu(self) -> Self:
        """Move the module to the CPU of its worker."""
        return self.to("cpu")

    def cuda(self, device: int | torch.device | None = None) -> Self:
        """Move the module to a CUDA device of its worker."""
        return self._to_kind("cuda", device)

    def xpu(self, device: int | torch.device | None = None) -> Self:
        """Move the module to an XPU of its worker."""
        return self._to_kind("xpu", device)

    def mtia(self, device: int | torch.device | None = None) -> Self:
        """Move the module to an MTIA device of its worker."""
        return self._to_kind("mtia", device)

    def ipu(self, device: int | torch.device | None = None) -> Self:
        """Move the module to an IPU of its worker."""
        return self._to_kind("ipu", device)

    def _to_kind(self, kind: str, device: int | torch.device | None) -> Self:
        return self.to(torch.device(kind, device) if isinstance(device, int) else device or kind)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        """Cast the module on its worker. Torch calls this when this module or one around it is cast or moved.

        We apply `fn` to empty tensors to find out what it casts. Moves are ignored: the module stays on its worker.
        """
        with torch.no_grad():
            probes: dict[torch.dtype, Any] = {dtype: fn(torch.empty(0, dtype=dtype)) for dtype in _DTYPES}
        if any(tensor.device.type == "cpu" and tensor.is_shared() for tensor in probes.values()):
            raise_unsupported("share_memory")
        casts = {old: tensor.dtype for old, tensor in probes.items() if old != tensor.dtype}
        if casts:
            self._run(remote_ops.cast, casts)
        return self


keep_uncompiled(__name__)
