"""Pickle tensor subclasses with custom reducers without losing their autograd edges.

A subclass's ``__reduce_ex__`` knows nothing about edges between workers. The edge is kept if it returns the same as
torch's own (the tensor itself is then attached), if the tensor is a jagged nested tensor (its values are attached), or
if it returns tensors whose history contains the tensor, such as ``x.as_subclass(torch.Tensor)``.
Otherwise the tensor is refused.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.autograd.graph import Node

from telegrad.errors import PayloadError
from telegrad.interrupts import interruptible
from telegrad.torch_private import (
    REBUILD_FROM_STORAGE,
    REBUILD_FROM_TYPE,
    REBUILD_PARAMETER,
    backward_hooks,
    forward_ad_level,
    jagged_dimension,
    jagged_sizes,
    no_torch_dispatch,
    no_torch_function,
    untyped,
)

_NODES_TO_SEARCH = 64
_PARTS_TO_SEARCH = 1000


@contextlib.contextmanager
def recording_history() -> Iterator[None]:
    """Enable grad mode: operations of a subclass while it is pickled must keep its history."""
    if torch.is_grad_enabled() and not torch.is_inference_mode_enabled():
        yield
    else:
        with torch.inference_mode(False), torch.enable_grad():
            yield


def reduce_with_history(reduce: Callable[[Any], Any], x: torch.Tensor) -> Any:
    """Call the reducer of a subclass. Operations in it are recorded by autograd."""
    with recording_history():
        return _reduce(reduce, x)


@interruptible
def _reduce(reduce: Callable[[Any], Any], x: torch.Tensor) -> Any:
    if not backward_hooks(x):
        return reduce(x)
    with warnings.catch_warnings():  # torch warns that hooks are not pickled: they are meant to stay here
        warnings.filterwarnings("ignore", message="backward hook")
        return reduce(x)


def standard_reduction(x: torch.Tensor, reduced: Any) -> tuple[type[torch.Tensor], Any, tuple[Any, ...]] | None:
    """Return class, state and further items of a reduction in torch's own format, or None for a custom one."""
    if not isinstance(reduced, tuple) or len(reduced) < 2:
        return None
    if reduced[0] in REBUILD_PARAMETER and len(reduced) == 2:
        data, state = reduced[1][0], reduced[1][3] if len(reduced[1]) > 3 else None
        same = isinstance(data, torch.Tensor) and data.data_ptr() == x.data_ptr() and data.shape == x.shape
        return (torch.nn.Parameter, state, ()) if same else None
    if reduced[0] not in REBUILD_FROM_TYPE:
        return None
    function, cls, args, state = reduced[1]
    if function not in REBUILD_FROM_STORAGE or not isinstance(cls, type) or not _same_memory(x, args):
        return None
    return cls, state, reduced[2:]


def _same_memory(x: torch.Tensor, args: Any) -> bool:
    """Whether the arguments of torch's rebuild functions describe this tensor, not one computed from it."""
    storage, offset, size = args[:3]
    storage = untyped(storage)
    with no_torch_function():
        found: bool = (storage.data_ptr(), offset, tuple(size)) == (
            x.untyped_storage().data_ptr(),
            x.storage_offset(),
            tuple(x.shape),
        )
    return found


def is_jagged(x: torch.Tensor) -> bool:
    """Whether this is a jagged nested tensor, whose values are one tensor."""
    return x.layout is torch.jagged


def jagged_parts(x: Any) -> tuple[Any, ...]:
    """Return the arguments with which `from_jagged` restores the nested tensor. Gradients flow through the values."""
    sizes = {key: jagged_sizes(x)[key].shape[0] for key in ("min_seqlen", "max_seqlen") if key in jagged_sizes(x)}
    with recording_history():
        return x.values(), x.offsets(), x.lengths(), jagged_dimension(x), sizes


def from_jagged(
    values: torch.Tensor, offsets: torch.Tensor, lengths: torch.Tensor | None, dimension: int, sizes: dict[str, int]
) -> torch.Tensor:
    """Return the nested tensor with these parts. Pickled values refer to this function by name."""
    return torch.nested.nested_tensor_from_jagged(values, offsets, lengths, jagged_dim=dimension, **sizes)


def check_keeps_history(x: torch.Tensor, reduced: Any) -> None:
    """Raise if no tensor in the reduction has `x` in its history: the edge of `x` would be lost."""
    node, number = _edge_of(x)
    for part in _tensors_in(reduced):
        if part is x or (part.requires_grad and _has_in_history(part, node, number)):
            return
    raise gradient_lost(
        x,
        "its class pickles it without its history",
        "send x.as_subclass(torch.Tensor) and restore the subclass on the receiver, or let __reduce_ex__ return that",
    )


def rebuild(function: Callable[..., Any], args: tuple[Any, ...], name: str) -> Any:
    """Call the restoring function of a subclass. Raise if the result lost the edge that its parts have.

    Pickled values refer to this function by name.
    """
    made = function(*args)
    if isinstance(made, torch.Tensor) and made.grad_fn is None and any(x.grad_fn for x in _tensors_in(args)):
        raise PayloadError(
            f"{getattr(function, '__qualname__', function)} restores a received {name} that requires grad without its "
            "history, so no gradient could flow back. Use as_subclass in that function instead of _make_subclass or "
            "detach, or send x.detach()"
        )
    return made


def check_not_dual(x: torch.Tensor) -> None:
    """Raise for a dual tensor of forward-mode AD."""
    if forward_ad_level() < 0:
        return
    unpack: Callable[[torch.Tensor], Any] = forward_ad.unpack_dual  # untyped in torch
    if unpack(x).tangent is not None:
        raise PayloadError(
            f"a dual tensor of forward-mode AD cannot be sent: the tangent of a {type(x).__name__} of shape "
            f"{list(x.shape)} would be lost. Send the primal and tangent of torch.autograd.forward_ad.unpack_dual(x), "
            "and create a dual tensor from them on the receiver"
        )


def check_has_memory(x: torch.Tensor) -> None:
    """Raise for a subclass with __torch_dispatch__ whose contents are not in its own memory."""
    with no_torch_function(), no_torch_dispatch():
        plain = x.as_subclass(torch.Tensor)
        is_proxy = plain.device != x.device
    try:
        empty = not is_proxy and plain.layout is torch.strided and plain.numel() and not plain.data_ptr()
    except RuntimeError:
        empty = True
    if is_proxy or (empty and not plain.is_meta):
        raise PayloadError(
            f"a {type(x).__name__} cannot be sent: it has no memory of its own. Send its inner tensors, or define "
            "__tensor_flatten__ and __tensor_unflatten__ in its class"
        )


def gradient_lost(x: torch.Tensor, why: str, remedy: str) -> PayloadError:
    """Return the error for a tensor to which no gradient could flow back."""
    return PayloadError(
        f"a {type(x).__name__} that requires grad cannot be sent in an autograd context: {why}, so no gradient could "
        f"flow back. If none is needed, send x.detach(). Otherwise {remedy}"
    )


def _edge_of(x: torch.Tensor) -> tuple[Node | None, int]:
    if x.grad_fn is not None:
        return x.grad_fn, x.output_nr
    with recording_history(), no_torch_function():
        if torch.nn.parameter.is_lazy(x):
            return None, 0
        return torch.autograd.graph.get_gradient_edge(x)[:2]


def _has_in_history(part: torch.Tensor, node: Node | None, number: int) -> bool:
    edges = [_edge_of(part)]
    for _ in range(_NODES_TO_SEARCH):
        if not edges:
            break
        found, output = edges.pop(0)
        if found is None:
            continue
        if found is node and output == number:
            return True
        edges += found.next_functions
    return False


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested tuples, lists and dicts."""
    parts = [value]
    for _ in range(_PARTS_TO_SEARCH):
        if not parts:
            return
        part = parts.pop()
        if isinstance(part, torch.Tensor):
            yield part
        elif isinstance(part, tuple | list):
            parts += part
        elif isinstance(part, dict):
            parts += part.values()
