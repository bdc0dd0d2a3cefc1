"""Run code in torch's default state, so that no mode of the calling thread affects what is sent or restored.

Default device, grad and inference mode, autocast and user-defined modes are per thread. Most threads have the default
state, and checking that is cheaper than leaving it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import _C  # the thread's mode stacks have no public interface

_is_grad_enabled = torch.is_grad_enabled
_is_inference_mode_enabled = torch.is_inference_mode_enabled
_function_modes = _C._len_torch_function_stack
_dispatch_modes = _C._len_torch_dispatch_stack
autocast_is_enabled: Callable[[], bool] = _C._is_any_autocast_enabled
"""Whether autocast is enabled in the calling thread, for any device."""


def has_default_torch_state() -> bool:
    """Whether the calling thread is in torch's default state."""
    return (
        _is_grad_enabled() and not _is_inference_mode_enabled() and not _function_modes() and not _dispatch_modes()
    ) and not autocast_is_enabled()


def can_read_tensors() -> bool:
    """Whether no mode intercepts reading tensors. Grad mode does not matter: gradients are sent without it."""
    return (
        not _is_inference_mode_enabled()
        and not _function_modes()
        and not _dispatch_modes()
        and not autocast_is_enabled()
    )


@contextlib.contextmanager
def default_torch_state() -> Iterator[None]:
    """Leave the thread's torch modes, including the default device, and restore them on exit."""
    with contextlib.ExitStack() as stack:
        while _function_modes():
            stack.callback(_C._push_on_torch_function_stack, _C._pop_torch_function_stack())
        while _dispatch_modes():
            stack.callback(_C._push_on_torch_dispatch_stack, _C._pop_torch_dispatch_stack(None))
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        if autocast_is_enabled():
            accelerator = torch.accelerator.current_accelerator()
            for device in {"cpu", accelerator.type if accelerator else "cpu"}:
                stack.enter_context(torch.autocast(device, enabled=False))
        yield
