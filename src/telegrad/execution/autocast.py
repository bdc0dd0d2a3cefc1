"""The caller's autocast holds in what it calls: read where a call is made, and entered where it is served."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from telegrad.torch_private import autocast_is_enabled
from telegrad.wire.descriptors import DTYPES, code_of
from telegrad.wire.messages import Autocast


def current() -> Autocast | None:
    """The autocast that the calling thread is in; None if in none."""
    if not autocast_is_enabled():
        return None
    devices = [(kind, code_of(torch.get_autocast_dtype(kind))) for kind in _kinds() if torch.is_autocast_enabled(kind)]
    return Autocast(tuple(devices), torch.is_autocast_cache_enabled()) if devices else None


@contextlib.contextmanager
def entered(autocast: Autocast | None) -> Iterator[None]:
    """Be in the same autocast, as far as this worker has the devices that it is for."""
    with contextlib.ExitStack() as stack:
        if autocast is not None:
            kinds = _kinds()
            for kind, code in autocast.devices:
                if kind in kinds and 0 <= code < len(DTYPES):
                    stack.enter_context(torch.autocast(kind, DTYPES[code], cache_enabled=autocast.cache))
        yield


def _kinds() -> set[str]:
    """The kinds of devices that there are here."""
    accelerator = torch.accelerator.current_accelerator()
    return {"cpu", accelerator.type} if accelerator is not None else {"cpu"}
