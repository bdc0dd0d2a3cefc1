"""Whether a tensor has memory whose contents can be sent."""

from __future__ import annotations

import torch

from telegrad.errors import PayloadError
from telegrad.torch_private import is_zero_tensor


def has_contents(x: torch.Tensor) -> bool:
    """Whether the tensor has memory. False for a zero tensor, which torch does not store. Raise if there is none."""
    try:
        if x.data_ptr():
            return True
        if is_zero_tensor(x):
            return False
    except RuntimeError as error:  # a tensor in vmap or another transform
        raise no_contents(x) from error
    raise no_contents(x)


def no_contents(x: torch.Tensor) -> PayloadError:
    """Return the error for a tensor without memory."""
    return PayloadError(
        f"a tensor of shape {tuple(x.shape)} and {x.dtype} cannot be sent: it has no memory of its own (a fake or "
        "wrapper tensor, a tensor in a function transform such as vmap or grad, or one whose storage was freed). "
        "Call from outside the transform"
    )
