"""Warns of an optimizer that was made before `split`: it updates the parameters that stayed behind, and no others.

`split` sends copies of the parameters and marks those that it leaves. Torch calls a hook before each step of any
optimizer of this process, which looks for marked ones.
"""

from __future__ import annotations

import threading
import warnings
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

_MARK = "_telegrad_moved_to"
_FRAMES = 3  # of torch, between the hook and the program
_lock = threading.Lock()  # of _hooked
_hooked = False


def mark_moved(part: torch.nn.Module, path: str, worker: str | int) -> None:
    """Remember that the parameters of a part are on another worker now."""
    global _hooked
    for name, parameter in part.named_parameters(path):
        setattr(parameter, _MARK, f"{name} is on worker {worker!r} now")
    with _lock:
        hooked, _hooked = _hooked, True
    if not hooked:
        register_optimizer_step_pre_hook(_check)


def _check(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            moved = getattr(parameter, _MARK, None)
            if moved is not None:
                warnings.warn(
                    f"this optimizer was made before split(), and updates parameters that the model no longer uses: "
                    f"{moved}. Make a telegrad.optim.DistributedOptimizer of telegrad.nn.parameter_rrefs(model) after "
                    "the split",
                    stacklevel=_FRAMES,
                )
                return
