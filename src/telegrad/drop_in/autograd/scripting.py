"""TorchScript operators for the functions of torch.distributed.autograd that scripts can call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.jit import _builtins

_library: Any = None  # the operators exist as long as this object does


def register(get_gradients: Callable[..., Any], backward: Callable[..., Any]) -> None:
    """Make TorchScript compile calls to these functions."""
    global _library
    if _library is not None:
        return
    library: Any = torch.library.Library
    known: Any = _builtins
    _library = library("telegrad", "DEF")
    for name, signature, function in (
        ("get_gradients", "(int context_id) -> Dict(Tensor, Tensor)", get_gradients),
        ("dist_backward", "(int context_id, Tensor[] roots, bool retain_graph=False) -> ()", backward),
    ):
        # Conservative: each call has side effects, so the compiler must not drop, move or merge any.
        _library.define(name + signature, alias_analysis="CONSERVATIVE")
        _library.impl(name, function, "CompositeImplicitAutograd")
        known._register_builtin(function, f"telegrad::{name}")
