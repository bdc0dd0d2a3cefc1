"""Optimizer steps without torch's profiler annotation when no profiler runs: it can take longer than the step."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer

from telegrad.backward.torch_private import profiled

_WRAPPER = Optimizer.profile_hook_step(lambda _: None).__code__


def run_step(optimizer: Optimizer) -> None:
    """Do the same as ``optimizer.step()``."""
    step: Any = type(optimizer).step
    # Torch wraps the class's step. Others may have wrapped it again, or assigned their own to the object.
    if getattr(step, "__code__", None) is not _WRAPPER or "step" in optimizer.__dict__ or needs_wrapper(optimizer):
        optimizer.step()
    else:
        step.__wrapped__(optimizer)


def needs_wrapper(optimizer: Any) -> bool:
    """Return whether a profiler or a step hook depends on torch's wrapper of ``step``."""
    return bool(
        optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
        or torch_optimizer._global_optimizer_pre_hooks
        or torch_optimizer._global_optimizer_post_hooks
        or profiled()
    )
