"""Nothing of the calling thread's torch state may leak into what is sent or rebuilt; this leaves that state.

Default device, grad and inference mode, autocast and the modes of the user are the state of a thread. Most threads have
none of it, which costs less to find out than to leave it.
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


def thread_is_neutral() -> bool:
    """Whether the calling thread has torch's initial state, so that there is nothing to leave."""
    return (
        _is_grad_enabled() and not _is_inference_mode_enabled() and not function_modes() and not dispatch_modes()
    ) and not autocast_is_enabled()


def nothing_intercepts() -> bool:
    """Whether tensors can be read as they are. Grad mode does not matter: gradients are sent without it."""
    return (
        not _is_inference_mode_enabled() and not function_modes() and not dispatch_modes() and not autocast_is_enabled()
    )


@contextlib.contextmanager
def neutral() -> Iterator[None]:
    """Leave the thread's torch modes (also the default device, which is one), and take them up again at the end."""
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
