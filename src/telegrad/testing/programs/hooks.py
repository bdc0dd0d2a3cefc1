"""Hooks of random programs, and the log that they write to."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch

Key = tuple[int, int]
"""The index of a pass, and the key of a hook."""


class Log:
    """Hook calls with their values, by pass and hook."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # protects calls
        self.calls: dict[Key, list[torch.Tensor]] = defaultdict(list)
        self.number = 0
        """The index of the running pass. The passes of a program run one after the other."""

    def add(self, key: int, value: torch.Tensor) -> None:
        """Log one call."""
        with self._lock:
            self.calls[self.number, key].append(value.detach().clone())

    def without_pass(self, number: int | None) -> dict[Key, list[torch.Tensor]]:
        """Return all calls except those of one pass."""
        return {key: values for key, values in self.calls.items() if key[0] != number}


def tensor_hook(log: Log, key: int) -> Callable[[torch.Tensor | None], torch.Tensor | None]:
    """Return a hook that logs the gradient and changes it."""

    def run(grad: torch.Tensor | None) -> torch.Tensor | None:
        if grad is None:
            # Torch calls hooks of unused outputs with None, and the tensors of a message are outputs of one node.
            return None
        log.add(key, grad)
        return grad * 0.5 if grad.is_complex() else grad.clamp(-2.0, 2.0)

    return run


def multi_grad_hook(log: Log, key: int, tensors: Sequence[torch.Tensor], mode: Any) -> Any:
    """Register a hook on several tensors. For 'any' it logs no value: the engine decides which gradient is first."""

    def on_all(grads: Sequence[torch.Tensor | None]) -> None:
        if any(grad is not None for grad in grads):  # see above: not if only unused outputs were called
            for index, grad in enumerate(grads):
                log.add(key + index, torch.zeros(()) if grad is None else grad)

    def on_any(grad: torch.Tensor | None) -> None:
        if grad is not None:
            log.add(key, torch.zeros(()))

    return torch.autograd.graph.register_multi_grad_hook(tensors, on_all if mode == "all" else on_any, mode=mode)


def post_accumulate_hook(
    log: Callable[[], Log], key: int, relay: Callable[[torch.Tensor], torch.Tensor], counted_only: bool
) -> Callable[[torch.Tensor], None]:
    """Return a hook that sends the gradient of a leaf to other workers, and logs their reply."""

    def run(leaf: torch.Tensor) -> None:
        assert leaf.grad is not None
        reply = relay(leaf.grad.detach().clone())
        log().add(key, torch.zeros(()) if counted_only else reply)

    return run
