"""Find tensors of one message whose elements overlap in memory, and how autograd relates them.

Overlapping tensors must share memory on the receiver too: a function that changes one of them in place must see the
change in the others, as in a single process. Tensors that merely share a storage (the chunks of a fused projection, the
columns of a matrix) need not.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from telegrad.torch_private import DEFAULT_CREATION, base_of, creation_of
from telegrad.wire.descriptors import DETACHED, ROOT, UNRELATED, VIEW_OF_ROOT, extent_of

Piece = tuple[int, int, int]
"""First address, end address, and index of a tensor."""

_MAX_CELLS = 2**26
"""Most bytes of memory for the search. Tensors that would need more are considered to overlap."""
_MAX_RELATED = 32
"""Most tensors in a group whose relation is determined: each is compared with each."""


def overlapping(pieces: Sequence[Piece], tensors: Mapping[int, torch.Tensor]) -> list[list[Piece]]:
    """Return groups of overlapping tensors: their address ranges are connected, and some share an element."""
    groups: list[list[Piece]] = []
    row: list[Piece] = []
    end = -1
    for piece in sorted(pieces):
        if row and piece[0] >= end:
            groups.append(row)
            row = []
        row.append(piece)
        end = max(end, piece[1]) if len(row) > 1 else piece[1]
    groups.append(row)
    return [group for group in groups if len(group) > 1 and _overlap(group, tensors)]


def _overlap(group: Sequence[Piece], tensors: Mapping[int, torch.Tensor]) -> bool:
    """Whether any two tensors have an element in common. Their pieces are sorted and connected."""
    first = group[0][0]
    runs = [(begin - first, *_runs(tensors[index])) for begin, _, index in group]
    solid_until = 0
    for begin, run, outer in runs:
        if begin < solid_until:
            return True
        if not outer:
            solid_until = begin + run
    # A tensor without gaps may start inside one with gaps. Then the positions of the gaps decide.
    cell = math.gcd(*[math.gcd(begin, run, *[step for _, step in outer]) for begin, run, outer in runs])
    cells = (max(end for _, end, _ in group) - first) // cell
    if cells > _MAX_CELLS:
        return True
    taken = torch.zeros(cells, dtype=torch.bool)
    for begin, run, outer in runs:
        shape = [*[size for size, _ in outer], run // cell]
        stride = [*[step // cell for _, step in outer], 1]
        cells_of_this = taken.as_strided(shape, stride, begin // cell)
        if cells_of_this.any():
            return True
        cells_of_this.fill_(True)
    return False


def _runs(x: torch.Tensor) -> tuple[int, list[tuple[int, int]]]:
    """Return the memory of a tensor as contiguous runs: their length, and their count and stride per dimension."""
    run = x.itemsize
    outer: list[tuple[int, int]] = []
    for step, size in sorted([(step * x.itemsize, size) for size, step in zip(x.shape, x.stride(), strict=True)]):
        if not step or size == 1:
            continue  # an expanded dimension repeats the same memory
        if step == run and not outer:
            run *= size
        else:
            outer.append((size, step))
    return run, outer


def relations(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Return how autograd relates overlapping tensors: which one is the root that the others are views of, if any.

    With a root, in-place operations on the receiver are recorded as they would be here. Without one, torch does not
    allow the receiver to change tensors in place that require grad.
    """
    differentiable = [x for x in tensors if x.requires_grad]
    comparable = len(set(map(id, tensors))) == len(tensors) <= _MAX_RELATED
    if differentiable and comparable and all(x.dtype is tensors[0].dtype for x in tensors):
        for root in differentiable:
            if _is_root(root, tensors, differentiable):
                return [ROOT if x is root else VIEW_OF_ROOT if x.requires_grad else DETACHED for x in tensors]
    return [UNRELATED] * len(tensors)


def _is_root(root: torch.Tensor, tensors: Sequence[torch.Tensor], differentiable: Sequence[torch.Tensor]) -> bool:
    begin, size = root.data_ptr(), root.nbytes
    base = base_of(root)
    if extent_of(root.shape, root.stride()) * root.itemsize != size or not _is_rewritable(root):
        return False
    for x in tensors:
        start = x.data_ptr()
        if start < begin or start + extent_of(x.shape, x.stride()) * x.itemsize > begin + size:
            return False
        if x.is_neg() or x.is_conj():
            return False
    return all(
        x is root or (base_of(x) is not None and (base_of(x) is root or base_of(x) is base) and _is_rewritable(x))
        for x in differentiable
    )


def _is_rewritable(x: torch.Tensor) -> bool:
    """Whether torch allows in-place operations on `x`: not if one function returned several views."""
    return base_of(x) is None or bool(creation_of(x) == DEFAULT_CREATION)
