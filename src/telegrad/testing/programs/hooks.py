"""Hooks of random programs, and the log that they write."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch

Key = tuple[int, int]
"""The number of a pass, and the key of a hook."""


class Log:
    """Calls of hooks, with their values, by pass."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # protects calls
        self.calls: dict[Key, list[torch.Tensor]] = defaultdict(list)
        self.number = 0
        """The pass that runs. Passes of a program run one after the other."""

    def add(self, key: int, value: torch.Tensor) -> None:
        """Note one call."""
        with self._lock:
            self.calls[self.number, key].append(value.detach().clone())

    def without_pass(self, number: int | None) -> dict[Key, list[torch.Tensor]]:
        """All calls but those of one pass."""
        return {key: values for key, values in self.calls.items() if key[0] != number}


def tensor_hook(log: Log, key: int) -> Callable[[torch.Tensor | None], torch.Tensor | None]:
    """A hook that notes what it sees, and changes it."""

    def run(grad: torch.Tensor | None) -> torch.Tensor | None:
        if grad is None:
            # Torch calls hooks of a node's unused outputs with None; a message's tensors are one node's outputs.
            return None
        log.add(key, grad)
        return grad * 0.5 if grad.is_complex() else grad.clamp(-2.0, 2.0)

    return run


def multi_grad_hook(log: Log, key: int, tensors: Sequence[torch.Tensor], mode: Any) -> Any:
    """Register a hook on several tensors. Which gradient is first is up to the engine, so 'any' notes the call only."""

    def on_all(grads: Sequence[torch.Tensor | None]) -> None:
        if any(grad is not None for grad in grads):  # as above: not if only unused siblings were called
            for index, grad in enumerate(grads):
                log.add(key + index, torch.zeros(()) if grad is None else grad)

    def on_any(grad: torch.Tensor | None) -> None:
        if grad is not None:
            log.add(key, torch.zeros(()))

    return torch.autograd.graph.register_multi_grad_hook(tensors, on_all if mode == "all" else on_any, mode=mode)


def post_accumulate_hook(
    log: Callable[[], Log], key: int, ask: Callable[[torch.Tensor], torch.Tensor], counted_only: bool
) -> Callable[[torch.Tensor], None]:
    """A hook that asks other workers about the gradient of a leaf, and notes what they say."""

    def run(leaf: torch.Tensor) -> None:
        assert leaf.grad is not None
        answer = ask(leaf.grad.detach().clone())
        log().add(key, torch.zeros(()) if counted_only else answer)

    return run
