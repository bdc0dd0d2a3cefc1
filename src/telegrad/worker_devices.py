"""The accelerators that this worker is to use, and the one that is current at first.

The launcher names them in TELEGRAD_DEVICES. Otherwise each of several workers of one machine uses the device of its
local rank, if there are enough for all, as programs under torchrun usually do.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch

from telegrad.environment.detection import local_rank
from telegrad.errors import TelegradError
from telegrad.wire.devices import describe_devices, local_devices

VARIABLE = "TELEGRAD_DEVICES"


def devices() -> list[torch.device]:
    """Return the accelerators that this worker is to use, the default one first; an empty list if there are none.

    These are the devices that ``telegrad run --devices-per-worker`` assigned to the worker (TELEGRAD_DEVICES). Without
    it, if the machine has an accelerator for each of its workers, the one whose index is the worker's LOCAL_RANK;
    otherwise all of the machine. Other devices can be used, too.

    >>> all(isinstance(device, torch.device) for device in telegrad.rpc.devices())
    True
    """
    counts = local_devices()
    chosen = assigned(os.environ)
    if chosen is None:
        chosen = by_local_rank(os.environ)
    if chosen is None:
        chosen = list(range(counts[0][1])) if counts else []
    return [torch.device(counts[0][0], index) for index in chosen]


def assigned(environ: Mapping[str, str]) -> list[int] | None:
    """Return the indices in TELEGRAD_DEVICES, or None if it is not set. Raises if this machine has too few devices."""
    chosen = parse(environ.get(VARIABLE, ""))
    if chosen is None:
        return None
    counts = local_devices()
    count = counts[0][1] if counts else 0
    if max(chosen) >= count:
        raise TelegradError(
            f"{VARIABLE} ({environ[VARIABLE]}) names device {max(chosen)}, so {max(chosen) + 1} devices are needed, "
            f"but this machine has {count} ({describe_devices(counts)}). Start fewer workers, or assign fewer devices "
            "to each (telegrad run --devices-per-worker)"
        )
    return chosen


def parse(text: str) -> list[int] | None:
    """Return the indices in a list of devices as in TELEGRAD_DEVICES, or None if the text is empty.

    >>> parse("2,3")
    [2, 3]
    """
    if not text.strip():
        return None
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdecimal() for part in parts) or len(set(parts)) < len(parts):
        raise ValueError(f"{VARIABLE} must be indices of different devices, such as 0,1, not {text!r}")
    return [int(part) for part in parts]


def by_local_rank(environ: Mapping[str, str]) -> list[int] | None:
    """Return the device of this worker's local rank, or None if there are not as many as workers of this machine."""
    rank, workers = local_rank(environ)
    if rank is None or workers is None or rank >= workers or workers < 2:
        return None
    counts = local_devices()
    return [rank] if counts and counts[0][1] >= workers else None


def share(rank: int, workers: int, per_worker: int, environ: Mapping[str, str]) -> str:
    """Return TELEGRAD_DEVICES for one of several workers that this process starts: so many consecutive devices.

    They are taken from this process's own TELEGRAD_DEVICES, if that is set. Raises a ValueError if this process knows
    that there are too few.

    >>> share(1, 2, 2, {"TELEGRAD_DEVICES": "4,5,6,7"})
    '6,7'
    """
    if per_worker < 1:
        raise ValueError(f"the number of devices per worker must be at least 1, not {per_worker}")
    needed = workers * per_worker
    given = parse(environ.get(VARIABLE, ""))
    counts = local_devices()
    # Without an accelerator here, the workers may load the backend of one themselves.
    available = given if given is not None else list(range(counts[0][1] if counts else needed))
    if len(available) < needed:
        there_are = f"this machine has {len(available)} ({describe_devices(counts)})"
        if given is not None:
            there_are = f"{VARIABLE} names {len(available)}"
        raise ValueError(
            f"{workers} workers with {per_worker} device{'s' if per_worker > 1 else ''} each need {needed} devices, "
            f"but {there_are}: start fewer workers, or assign fewer devices to each"
        )
    return ",".join(map(str, available[rank * per_worker : (rank + 1) * per_worker]))


def choose_default(*, follow_rank: bool) -> int | None:
    """Make this worker's first device the current one, and return its index; None if it is not assigned one.

    With `follow_rank`, the local rank counts as an assignment.
    """
    chosen = assigned(os.environ)
    if chosen is None and follow_rank:
        chosen = by_local_rank(os.environ)
    # The first device is current anyway, and torch would initialize it, which takes seconds on some.
    if not chosen or chosen[0] == 0:
        return None
    torch.accelerator.set_device_index(chosen[0])
    return chosen[0]
