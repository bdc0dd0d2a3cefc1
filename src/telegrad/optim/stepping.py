"""Steps without torch's annotation for profilers, where no profiler looks: it takes longer than a small step."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer

from telegrad.backward.torch_private import profiled

_WRAPPER = Optimizer.profile_hook_step(lambda _: None).__code__


def run_step(optimizer: Optimizer) -> None:
    """What ``optimizer.step()`` does."""
    step: Any = type(optimizer).step
    # Torch wraps the class's step. Others may have wrapped it again, or put one of their own on the object.
    if getattr(step, "__code__", None) is not _WRAPPER or "step" in optimizer.__dict__ or must_be_annotated(optimizer):
        optimizer.step()
    else:
        step.__wrapped__(optimizer)


def must_be_annotated(optimizer: Any) -> bool:
    """Whether anybody would miss torch's wrapper of a step: a profiler, or a hook that it runs."""
    return bool(
        optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
        or torch_optimizer._global_optimizer_pre_hooks
        or torch_optimizer._global_optimizer_post_hooks
        or profiled()
    )
