"""The module `torch.sim` of the simulated accelerator: the functions that torch expects of a backend.

Random operators on the devices draw from the generator of the CPU: with the same seed, a program draws the same numbers
on a device as on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Stream = torch.Stream
Event = torch.Event
device_count: Callable[[], int]
"""Returns the number of devices. Set by `install`."""
current_device = torch.accelerator.current_device_index
current_stream = torch.accelerator.current_stream
set_device = torch.accelerator.set_device_index
set_stream = torch.accelerator.set_stream
synchronize = torch.accelerator.synchronize
memory_allocated = torch.accelerator.memory_allocated
empty_cache = torch.accelerator.empty_cache


class device(torch.accelerator.device_index):  # noqa: N801  # torch's name, as in `with torch.cuda.device(1)`
    """Makes a device the current one in a block: an index, a name or a torch.device."""

    def __init__(self, device: int | str | torch.device | None) -> None:
        super().__init__(device if device is None or isinstance(device, int) else torch.device(device).index)


def is_available() -> bool:
    """Return whether there are devices: always."""
    return True


def is_initialized() -> bool:
    """Return whether the devices can be used: always."""
    return True


def _is_in_bad_fork() -> bool:
    return False


def manual_seed_all(seed: int) -> None:
    """Do nothing: torch.manual_seed has seeded the generator that the devices use."""


def get_rng_state(device: Any = None) -> torch.Tensor:
    """Return the state of the generator of the CPU."""
    return torch.get_rng_state()


def set_rng_state(new_state: torch.Tensor, device: Any = None) -> None:
    """Set the state of the generator of the CPU."""
    torch.set_rng_state(new_state)


def get_amp_supported_dtype() -> list[torch.dtype]:
    """Return the types that `torch.autocast("sim")` accepts."""
    return [torch.float16, torch.bfloat16]
