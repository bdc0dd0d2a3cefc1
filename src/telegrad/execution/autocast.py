"""Carries the caller's autocast state to the function that it calls on another worker."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from telegrad.torch_private import autocast_is_enabled
from telegrad.wire.descriptors import DTYPES, code_of
from telegrad.wire.messages import Autocast


def current_autocast() -> Autocast | None:
    """Return the autocast state of the current thread, or None if autocast is off."""
    if not autocast_is_enabled():
        return None
    devices = [(kind, code_of(torch.get_autocast_dtype(kind))) for kind in _kinds() if torch.is_autocast_enabled(kind)]
    return Autocast(tuple(devices), torch.is_autocast_cache_enabled()) if devices else None


@contextlib.contextmanager
def enter_autocast(autocast: Autocast | None) -> Iterator[None]:
    """Enter the caller's autocast, for those of its devices that this worker has."""
    with contextlib.ExitStack() as stack:
        if autocast is not None:
            kinds = _kinds()
            for kind, code in dict(autocast.devices).items():  # each once, however often a peer names it
                if kind in kinds and 0 <= code < len(DTYPES):
                    stack.enter_context(torch.autocast(kind, DTYPES[code], cache_enabled=autocast.cache))
        yield


def _kinds() -> set[str]:
    """Return the device types of this worker."""
    accelerator = torch.accelerator.current_accelerator()
    return {"cpu", accelerator.type} if accelerator is not None else {"cpu"}
