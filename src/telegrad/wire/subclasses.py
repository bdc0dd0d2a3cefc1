"""Tensor subclasses that say themselves how they are pickled: what requires grad keeps its edge, or is refused.

A subclass's own ``__reduce_ex__`` knows nothing of edges between workers. They are kept if it returns what torch's own
returns (then the tensor itself travels beside the bytes), if it is a jagged nested tensor (then its values do), or if
it returns tensors that lead to it in the graph, such as ``x.as_subclass(torch.Tensor)``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.autograd.graph import Node

from telegrad.errors import PayloadError
from telegrad.torch_private import (
    REBUILD_FROM_STORAGE,
    REBUILD_FROM_TYPE,
    REBUILD_PARAMETER,
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
def recorded() -> Iterator[None]:
    """What a subclass does with itself while it is pickled is no operation of the program: it keeps its history."""
    if torch.is_grad_enabled() and not torch.is_inference_mode_enabled():
        yield
    else:
        with torch.inference_mode(False), torch.enable_grad():
            yield


def as_torch_pickles(x: torch.Tensor, reduced: Any) -> tuple[type[torch.Tensor], Any, tuple[Any, ...]] | None:
    """The class, the state and the rest, if a subclass is pickled as torch pickles it; None if in a way of its own."""
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
    """Whether these arguments of torch's rebuilding functions describe the tensor, and not one made of it."""
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
    """Whether it is a nested tensor whose values lie in one tensor."""
    return x.layout is torch.jagged


def jagged_parts(x: Any) -> tuple[Any, ...]:
    """What `from_jagged` makes the nested tensor of again; gradients flow through the values."""
    known = jagged_sizes(x)
    sizes = {key: known[key].shape[0] for key in ("min_seqlen", "max_seqlen") if key in known}
    with recorded():
        return x.values(), x.offsets(), x.lengths(), jagged_dimension(x), sizes


def from_jagged(
    values: torch.Tensor, offsets: torch.Tensor, lengths: torch.Tensor | None, dimension: int, sizes: dict[str, int]
) -> torch.Tensor:
    """The nested tensor with these parts."""
    return torch.nested.nested_tensor_from_jagged(values, offsets, lengths, jagged_dim=dimension, **sizes)


def check_leads_back(x: torch.Tensor, reduced: Any) -> None:
    """Raise if none of the tensors that a subclass is pickled as leads to it in the graph: its edge would be lost."""
    node, number = _edge_of(x)
    for part in _tensors_in(reduced):
        if part is x or (part.requires_grad and _leads_to(part, node, number)):
            return
    raise refusal(
        x,
        "the way in which its class pickles it leaves its history out",
        "send x.as_subclass(torch.Tensor) and make it a subclass again there, or let __reduce_ex__ return that",
    )


def rebuild(function: Callable[..., Any], args: tuple[Any, ...], name: str) -> Any:
    """Call what a subclass has given to be called, and raise if the result has no edge although its parts have."""
    made = function(*args)
    if isinstance(made, torch.Tensor) and made.grad_fn is None and any(x.grad_fn for x in _tensors_in(args)):
        raise PayloadError(
            f"a {name} that requires grad came, but {getattr(function, '__qualname__', function)} makes it without its "
            "history, so no gradient could flow back. Let that function use as_subclass, not _make_subclass or "
            "detach, or send x.detach()"
        )
    return made


def check_not_dual(x: torch.Tensor) -> None:
    """Raise for a dual tensor of forward-mode AD."""
    if forward_ad_level() < 0:
        return
    unpack: Callable[[torch.Tensor], Any] = forward_ad.unpack_dual  # torch gives it no types
    if unpack(x).tangent is not None:
        raise PayloadError(
            f"a dual tensor of forward-mode AD cannot be sent: the tangent of a {type(x).__name__} of shape "
            f"{list(x.shape)} would be lost. Send torch.autograd.forward_ad.unpack_dual(x), primal and tangent, and "
            "make a dual tensor of them there"
        )


def check_has_memory(x: torch.Tensor) -> None:
    """Raise for a subclass that handles operations itself, if its contents are not its own to send."""
    with no_torch_function(), no_torch_dispatch():
        plain = x.as_subclass(torch.Tensor)
        stands_for_another = plain.device != x.device
    try:
        empty = not stands_for_another and plain.layout is torch.strided and plain.numel() and not plain.data_ptr()
    except RuntimeError:
        empty = True
    if stands_for_another or (empty and not plain.is_meta):
        raise PayloadError(
            f"a {type(x).__name__} cannot be sent: it has no memory of its own. Send the tensors that it consists of, "
            "or give its class __tensor_flatten__ and __tensor_unflatten__"
        )


def refusal(x: torch.Tensor, why: str, instead: str) -> PayloadError:
    """The error of a tensor whose gradient could not flow back."""
    return PayloadError(
        f"a {type(x).__name__} that requires grad cannot be sent in an autograd context: {why}, so no gradient could "
        f"flow back. If none is needed, send its detach(); otherwise {instead}"
    )


def _edge_of(x: torch.Tensor) -> tuple[Node | None, int]:
    if x.grad_fn is not None:
        return x.grad_fn, x.output_nr
    with recorded(), no_torch_function():
        if torch.nn.parameter.is_lazy(x):
            return None, 0
        return torch.autograd.graph.get_gradient_edge(x)[:2]


def _leads_to(part: torch.Tensor, node: Node | None, number: int) -> bool:
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
    """The tensors in tuples, lists and dicts."""
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
