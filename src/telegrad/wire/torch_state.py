"""Run code in torch's default state, so that no mode of the calling thread affects what is sent or restored.

Default device, grad and inference mode, autocast and user-defined modes are per thread. Most threads have the default
state, and checking that is cheaper than leaving it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from telegrad.torch_private import (
    autocast_is_enabled,
    dispatch_modes,
    function_modes,
    pop_dispatch_mode,
    pop_function_mode,
    push_dispatch_mode,
    push_function_mode,
)

_is_grad_enabled = torch.is_grad_enabled
_is_inference_mode_enabled = torch.is_inference_mode_enabled


def has_default_torch_state() -> bool:
    """Whether the calling thread is in torch's default state."""
    return (
        _is_grad_enabled() and not _is_inference_mode_enabled() and not function_modes() and not dispatch_modes()
    ) and not autocast_is_enabled()


def can_read_tensors() -> bool:
    """Whether no mode intercepts reading tensors. Grad mode does not matter: gradients are sent without it."""
    return (
        not _is_inference_mode_enabled() and not function_modes() and not dispatch_modes() and not autocast_is_enabled()
    )


@contextlib.contextmanager
def default_torch_state() -> Iterator[None]:
    """Leave the thread's torch modes, including the default device, and restore them on exit."""
    with contextlib.ExitStack() as stack:
        while function_modes():
            stack.callback(push_function_mode, pop_function_mode())
        while dispatch_modes():
            stack.callback(push_dispatch_mode, pop_dispatch_mode(None))
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        if autocast_is_enabled():
            accelerator = torch.accelerator.current_accelerator()
            for device in {"cpu", accelerator.type if accelerator else "cpu"}:
                stack.enter_context(torch.autocast(device, enabled=False))
        yield
