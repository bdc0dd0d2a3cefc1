"""Warns of an optimizer that was made before `split`: it updates the parameters that stayed behind, and no others.

`split` sends copies of the parameters. Those that it leaves are freed at once, unless somebody holds them, as such an
optimizer does. While any of them lives, torch calls a hook before each step of any optimizer of this process.
"""

from __future__ import annotations

import threading
import warnings
import weakref
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

_FRAMES = 3  # of torch, between the hook and the program
_lock = threading.RLock()  # of the two below; a parameter may be freed on a thread that holds it
_moved: dict[int, tuple[weakref.ref[torch.nn.Parameter], str]] = {}
_hook: RemovableHandle | None = None


def watch_moved(part: torch.nn.Module, path: str, worker: str | int) -> None:
    """Remember that the parameters of a part are on another worker now."""
    global _hook
    with _lock:
        for name, parameter in part.named_parameters(path):
            key = id(parameter)
            _moved[key] = weakref.ref(parameter, partial(_forget, key)), f"{name} is on worker {worker!r} now"
        if _moved and _hook is None:
            _hook = register_optimizer_step_pre_hook(_check)


def _forget(key: int, freed: weakref.ref[torch.nn.Parameter]) -> None:
    global _hook
    with _lock:
        if key in _moved and _moved[key][0] is freed:
            del _moved[key]
        if not _moved and _hook is not None:
            _hook.remove()
            _hook = None


def _check(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            found = _moved.get(id(parameter))
            if found is not None and found[0]() is parameter:
                warnings.warn(
                    f"this optimizer was made before split(), and updates parameters that the model no longer uses: "
                    f"{found[1]}. Make a telegrad.optim.DistributedOptimizer of telegrad.nn.parameter_rrefs(model) "
                    "after the split",
                    stacklevel=_FRAMES,
                )
                return
