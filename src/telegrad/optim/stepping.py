"""Steps without torch's annotation for profilers, where no profiler looks: it takes longer than a small step."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer

from telegrad.torch_private import must_be_annotated

_WRAPPER = Optimizer.profile_hook_step(lambda _: None).__code__


def run_step(optimizer: Optimizer) -> None:
    """What ``optimizer.step()`` does."""
    step: Any = type(optimizer).step
    # Torch wraps the class's step. Others may have wrapped it again, or put one of their own on the object.
    if getattr(step, "__code__", None) is not _WRAPPER or "step" in optimizer.__dict__ or must_be_annotated(optimizer):
        optimizer.step()
    else:
        step.__wrapped__(optimizer)
