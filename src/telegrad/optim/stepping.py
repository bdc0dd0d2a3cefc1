"""Optimizer steps without torch's profiler annotation when no profiler runs: it can take longer than the step."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer

from telegrad.torch_private import must_be_annotated

_WRAPPER = Optimizer.profile_hook_step(lambda _: None).__code__


def run_step(optimizer: Optimizer) -> None:
    """Do the same as ``optimizer.step()``."""
    step: Any = type(optimizer).step
    # Torch wraps the class's step. Others may have wrapped it again, or assigned their own to the object.
    if getattr(step, "__code__", None) is not _WRAPPER or "step" in optimizer.__dict__ or must_be_annotated(optimizer):
        optimizer.step()
    else:
        step.__wrapped__(optimizer)
