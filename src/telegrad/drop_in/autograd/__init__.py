"""torch.distributed.autograd on telegrad: its names, signatures, defaults and error messages."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from types import TracebackType
from typing import Any

import torch
from torch._C._autograd import _profiler_enabled

from telegrad import autograd as dist_autograd
from telegrad.autograd import (
    _current_context,
    _get_max_id,
    _init,
    _is_valid_context,
    _new_context,
    _release_context,
    _retrieve_context,
    get_gradients,
)
from telegrad.backward.contexts import DistAutogradContext
from telegrad.backward.graph_breaks import keep_uncompiled

__all__ = ["DistAutogradContext", "backward", "context", "get_gradients", "is_available"]


def is_available() -> bool:
    """Return whether distributed autograd is available: always True."""
    return True


class context:  # noqa: N801 - torch's name
    """The scope of a forward and backward pass."""

    def __enter__(self) -> int:
        self.autograd_context = _new_context()
        return self.autograd_context._context_id()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _release_context(self.autograd_context._context_id())


def backward(context_id: int, roots: Sequence[torch.Tensor], retain_graph: bool = False) -> None:
    """Run one backward pass from `roots` through every worker that took part in the context."""
    if not isinstance(context_id, int) or not isinstance(roots, list | tuple):
        raise TypeError(
            "backward(): incompatible function arguments. It takes a context id and a list of tensors, not "
            f"{context_id!r} and {type(roots).__name__}"
        )
    for root in roots:
        if isinstance(root, torch.Tensor) and root.requires_grad and root.grad_fn is None and root.numel() == 1:
            raise RuntimeError(f"{root!r} does not have a valid gradient function.")
    profiled: Any = torch.autograd.profiler.record_function if _profiler_enabled() else nullcontext
    with profiled("torch::distributed::autograd::backward"):
        dist_autograd.backward(context_id, roots, retain_graph)


def _get_debug_info() -> dict[str, int]:
    info = dist_autograd._get_debug_info()
    return {name: int(info[name]) for name in ("num_current_backward_passes", "num_autograd_contexts")}


keep_uncompiled(__name__)
