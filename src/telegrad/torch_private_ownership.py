"""Who holds a tensor and its memory, from the reference counts of Python and torch.

What nobody else holds need not be copied before it is kept or sent. Every doubt is a no: then it is copied.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import _C

from telegrad.torch_private import base_of, is_view


def _counts_all_references(tensor: torch.Tensor) -> bool:
    """Whether `sys.getrefcount` counts the references of local variables and arguments, as it does before 3.14."""
    return sys.getrefcount(tensor) == 4  # held by: the caller's list, its variable, the argument, and getrefcount's


_use_count: Callable[[torch.Tensor], int] = _C.TensorBase._use_count  # type: ignore[attr-defined]  # private
"""Returns how many references there are to a tensor in C++. Python counts as one, with all its references."""

_held = [torch.zeros((), device="cpu")]
_tensor_held = _held[0]
_COUNTS_ALL = _counts_all_references(_tensor_held)
"""Where it is False nobody can tell who holds a tensor, so tensors are copied."""
del _held, _tensor_held


def nobody_else_holds(tensor: torch.Tensor, python_references: int) -> bool:
    """Whether a tensor and its memory belong to the caller alone, who has so many Python references to it.

    A view that has no graph may keep its base, if nothing else holds that. Memory that torch did not allocate may have
    other owners: see `is_only_access`.
    """
    holders = 2  # the tensor, and the object that untyped_storage returns
    if is_view(tensor) and not tensor.requires_grad:
        if _base_is_held(tensor):
            return False
        holders = 3
    return (
        _COUNTS_ALL
        and sys.getrefcount(tensor) <= python_references + 2  # this function's argument, and getrefcount's
        and _use_count(tensor) == 1
        and _storage_is_unheld(tensor, holders)
    )


def nobody_else_holds_any(tensors: Sequence[torch.Tensor], python_references: int) -> bool:
    """Whether all of these strided tensors belong to the caller alone, who has so many references to each of them."""
    # Not a generator, which would hold another reference.
    return all([nobody_else_holds(tensor, python_references + 1) for tensor in tensors])  # noqa: C419 - as above


def is_only_access(tensor: torch.Tensor, *, received: bool = False) -> bool:
    """Whether memory of a tensor that `nobody_else_holds` can be reached through the tensor alone.

    Not if it came from outside torch (an array, a file), unless it is memory in which telegrad has `received` a tensor,
    to which telegrad has a weak reference then; not if it is shared with other processes; and not if there are other
    weak references, to the tensor or its storage.
    """
    if weakref.getweakrefcount(tensor) or _use_count(tensor) != 1 or not _storage_is_unheld(tensor, 2):
        return False
    storage = tensor.untyped_storage()
    if weakref.getweakrefcount(storage) != int(received):
        return False
    return not storage.is_shared() and (received or storage.resizable())


def _references_to_storage(tensor: torch.Tensor) -> tuple[int, int]:
    """How many references, in Python and in C++, there are to the storage of a tensor."""
    storage: Any = tensor.untyped_storage()
    return sys.getrefcount(storage), _C._storage_Use_Count(storage._cdata)


def _references_to_base(view: torch.Tensor) -> tuple[int, int]:
    """How many references, in Python and in C++, there are to what a view is a view of."""
    base: Any = base_of(view)
    return sys.getrefcount(base), _use_count(base)


# What torch and these functions themselves hold.
_UNHELD_STORAGE = _references_to_storage(torch.zeros(2, device="cpu"))[0]
_UNHELD = _references_to_base(torch.zeros(2, 2, device="cpu").t())


def _storage_is_unheld(tensor: torch.Tensor, holders: int) -> bool:
    """Whether at most so many hold the storage in C++, and no program holds it in Python."""
    in_python, in_cpp = _references_to_storage(tensor)
    return in_cpp <= holders and in_python <= _UNHELD_STORAGE


def _base_is_held(view: torch.Tensor) -> bool:
    """Whether anything but the view holds its base."""
    in_python, in_cpp = _references_to_base(view)
    return in_python > _UNHELD[0] or in_cpp > _UNHELD[1]
