"""Distributed autograd.

The functions below act on the process's default agent, and so are defined in `telegrad.rpc.dist_autograd`. The modules
of this folder know of no default: they act on agents as objects.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from telegrad.rpc.dist_autograd import ContextId, backward, context, get_gradients, grad, is_available

__all__ = ["ContextId", "backward", "context", "get_gradients", "grad", "is_available"]

_PYTORCHS_PRIVATE_NAMES = (
    "_current_context",
    "_get_debug_info",
    "_get_max_id",
    "_has_valid_context",
    "_init",
    "_is_valid_context",
    "_new_context",
    "_release_context",
    "_retrieve_context",
)


def __getattr__(name: str) -> Any:
    if name in __all__ or name in _PYTORCHS_PRIVATE_NAMES:
        from telegrad.rpc import dist_autograd  # late: the arrow points up, for this facade only

        found = globals()[name] = getattr(dist_autograd, name)  # so that it is looked for once
        return found
    raise AttributeError(f"module 'telegrad.autograd' has no attribute {name!r}")
