"""The functions of torch.distributed.autograd that TorchScript can call: operators that lead to telegrad's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.jit import _builtins

_library: Any = None  # the operators are there for as long as it is


def register(get_gradients: Callable[..., Any], backward: Callable[..., Any]) -> None:
    """Have TorchScript compile calls of these functions."""
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
        # Conservative: each call has effects, so none is dropped, moved or merged with another.
        _library.define(name + signature, alias_analysis="CONSERVATIVE")
        _library.impl(name, function, "CompositeImplicitAutograd")
        known._register_builtin(function, f"telegrad::{name}")
