"""Anomaly mode on workers other than the one that began the pass.

Torch's own mode is process-wide, and would also fail passes that have it off. So nodes are checked one by one, for one
run of the engine.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from functools import partial
from threading import get_ident
from typing import Any

import torch

from telegrad.backward import islands


def is_checking() -> bool:
    """Whether torch itself checks gradients for NaN now."""
    return torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled()


@contextlib.contextmanager
def nan_checked(starts: Iterable[islands.Start]) -> Iterator[None]:
    """Make nodes behind these raise if they return NaN to the engine on this thread in the block."""
    nodes: set[Any] = set()
    islands.reach(starts, nodes)
    thread = get_ident()
    handles = [node.register_hook(partial(_check, node, thread)) for node in nodes if node.next_functions]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _check(node: Any, thread: int, outputs: Iterable[torch.Tensor | None], inputs: Any) -> None:
    if get_ident() != thread:  # it runs for a pass of another context
        return
    for number, output in enumerate(outputs):
        if output is not None and _has_nan(output):
            lines = "".join(node.metadata.get("traceback_", ()))
            origin = (
                f"It was made here:\n{lines}"
                if lines
                else "To see where it was made, use torch.autograd.detect_anomaly() on this worker in the forward pass."
            )
            raise RuntimeError(f"Function '{node.name()}' returned nan values in its {number}th output. {origin}")


@torch.no_grad()
def _has_nan(tensor: torch.Tensor) -> bool:
    if tensor.is_nested:
        return any(map(_has_nan, tensor.unbind()))
    if tensor.layout != torch.strided:
        tensor = tensor.to_dense()
    return bool(tensor.isnan().any())
