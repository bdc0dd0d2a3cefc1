"""The state of a tensor: its values, ``.grad``, ``requires_grad`` and device. Saved values are on the CPU."""

from __future__ import annotations

import torch
from torch.nn.parameter import is_lazy

from telegrad.errors import TelegradError

SavedTensor = tuple[torch.Tensor, torch.Tensor | None, bool, str]
"""The values, ``.grad``, ``requires_grad``, and the device that the tensor was on."""


def save(tensor: torch.Tensor) -> SavedTensor:
    """Return a copy of a tensor."""
    if is_lazy(tensor):
        raise TypeError(
            "no snapshot can be taken of a parameter that is not initialized: call lazy modules once in the build "
            "function"
        )
    if tensor.is_meta:
        raise TypeError("no snapshot can be taken of a tensor on the meta device: it has no values")
    if tensor.is_nested:
        raise TypeError("no snapshot can be taken of a nested tensor: put its values() and offsets() into the state")
    grad = tensor.grad if tensor.is_leaf else None
    return on_cpu(tensor), None if grad is None else on_cpu(grad), tensor.requires_grad, str(tensor.device)


def on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of the values of a tensor."""
    return tensor.detach().to("cpu", copy=True)


def fits(tensor: torch.Tensor, saved: SavedTensor) -> bool:
    """Return whether a tensor can take saved values."""
    if is_lazy(tensor):
        return False
    values = saved[0]
    if (tensor.shape, tensor.dtype, tensor.layout) != (values.shape, values.dtype, values.layout):
        return False
    return not _is_compressed(tensor) or tensor.values().shape == values.values().shape


def load(tensor: torch.Tensor, saved: SavedTensor) -> None:
    """Change a tensor in place. Raises if it does not fit."""
    values, grad, requires_grad, _ = saved
    if not fits(tensor, saved):
        raise TelegradError(f"{_described(values)} was saved, and {_described(tensor)} built")
    if _has_place(tensor):
        with torch.no_grad():
            tensor.detach().copy_(values)
    else:
        tensor.data = values.to(tensor.device, copy=True)
    if tensor.requires_grad != requires_grad:
        tensor.requires_grad_(requires_grad)
    tensor.grad = None if grad is None else grad.to(tensor.device, copy=True)


def new(saved: SavedTensor) -> torch.Tensor:
    """Return another tensor like the one that was saved."""
    values, grad, requires_grad, device = saved
    tensor = values.to(device, copy=True).requires_grad_(requires_grad)
    tensor.grad = None if grad is None else grad.to(device, copy=True)
    return tensor


def _has_place(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has memory for each of its values. Views of it get them, too."""
    if _is_compressed(tensor):
        return True
    if tensor.layout is not torch.strided or tensor.is_quantized:
        return False
    return all(stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1)


def _is_compressed(tensor: torch.Tensor) -> bool:
    return tensor.layout in (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


def _described(tensor: torch.Tensor) -> str:
    if is_lazy(tensor):
        return "one that is not initialized"
    layout = "" if tensor.layout is torch.strided else f" and layout {tensor.layout}"
    return f"a tensor of shape {list(tensor.shape)} and type {tensor.dtype}{layout}"
