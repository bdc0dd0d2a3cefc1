"""Checks the tensors that a pass is begun with, as torch does, and with its words where programs may match them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch.autograd.graph import GradientEdge

from telegrad.backward.graph import Roots
from telegrad.backward.nodes import ONE
from telegrad.errors import TelegradError
from telegrad.torch_private import gradient_edge


def as_list(tensors: Sequence[torch.Tensor] | torch.Tensor) -> list[torch.Tensor]:
    """Return one tensor, or several, as a list."""
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def edges_of(inputs: Sequence[torch.Tensor] | torch.Tensor) -> list[GradientEdge]:
    """Return the edges of inputs. Raises if there are none, or if one cannot have a gradient."""
    inputs = as_list(inputs)
    if not inputs:
        raise ValueError("inputs cannot be empty")
    for number, tensor in enumerate(inputs):
        if not isinstance(tensor, torch.Tensor) or not tensor.requires_grad:
            raise TelegradError(f"One of the differentiated Tensors does not require grad: inputs[{number}]")
    return [gradient_edge(tensor) for tensor in inputs]


def check_roots(roots: Sequence[torch.Tensor] | torch.Tensor, grads: Sequence[torch.Tensor | None] | None) -> Roots:
    """Return the roots with a gradient each."""
    if not isinstance(roots, torch.Tensor | Iterable):
        raise TypeError(f"roots must be a Tensor or a list of them, not a {type(roots).__name__}")
    roots = [roots] if isinstance(roots, torch.Tensor) else list(roots)
    if not roots:
        raise TelegradError("No tensors provided for gradient computation.")
    if isinstance(grads, torch.Tensor):
        grads = [grads]
    given = list(grads) if grads is not None else [None] * len(roots)
    if len(given) != len(roots):
        raise TelegradError(f"got {len(roots)} roots and {len(given)} gradients")
    made: list[torch.Tensor | None] = []
    for number, (root, grad) in enumerate(zip(roots, given, strict=True)):
        if not isinstance(root, torch.Tensor):
            raise TypeError(f"roots[{number}] is a {type(root).__name__}, not a Tensor")
        if not root.requires_grad:
            raise TelegradError(
                f"requires_grad not set on root: roots[{number}] does not require grad and has no graph, so there is "
                "nothing to differentiate"
            )
        if grad is None:
            if root.numel() != 1:
                raise TelegradError(
                    f"roots[{number}] of shape {list(root.shape)} is not a scalar, all roots need to be scalar unless "
                    "grad_tensors are given"
                )
            if root.is_complex():
                raise TelegradError(
                    f"grad can be implicitly created only for real scalar outputs but roots[{number}] is {root.dtype}: "
                    "give grad_tensors"
                )
            # A copy costs less: sending tensors has just made some, and its code is in the caches.
            plain = type(root) is torch.Tensor and root.dtype is torch.float32 and root.is_cpu and root.dim() == 0
            grad = ONE.clone() if plain else torch.ones_like(root)
        elif grad.shape != root.shape:
            raise TelegradError(
                f"grad_tensors[{number}] has shape {list(grad.shape)}, but roots[{number}] has {list(root.shape)}"
            )
        made.append(grad)
    return Roots(roots, made)
