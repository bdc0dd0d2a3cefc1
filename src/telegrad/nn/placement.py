"""Where a module is to live, as people write it: "worker", "worker/cuda:0", "rank:1/cpu"; and values on devices."""

from __future__ import annotations

import copy
import dataclasses
import re
from collections import UserDict
from collections.abc import Callable
from typing import Any

import msgspec
import torch

from telegrad.default_agent import default_agent
from telegrad.errors import TelegradError
from telegrad.rpc.api import get_worker_info

_RANK = re.compile(r"rank:(\d+)\Z")


class Place(msgspec.Struct, frozen=True):
    """A device of a worker."""

    on: str | int
    """The worker's name, or its id if the place was given as a rank."""
    device: str


def parse_place(text: str | torch.device) -> Place:
    """Read a place. A device alone ("cpu", "cuda:1") is one of this worker; a worker alone means its CPU.

    A worker that is not in the group is an error, and so is what cannot be a device. Whether the worker has the device
    is for the worker to say.
    """
    if isinstance(text, torch.device):
        return Place(get_worker_info().name, str(text))
    if not isinstance(text, str):
        raise TypeError(f"a place is a string, as 'worker1/cpu', and not {text!r}")
    worker, slash, device = text.partition("/")
    if not worker or "/" in device:
        raise ValueError(
            f"Could not parse remote_device: {text}. The valid format is '<workername>/<device>' or "
            "'rank:<rank>/<device>' or '<device>'"
        )
    agent = default_agent()
    names = {record.name for record in agent.peers.records()}
    if not slash and worker not in names and _is_device(worker):
        return Place(agent.me.name, str(torch.device(worker)))
    rank = _RANK.match(worker) if worker not in names else None
    on = int(rank[1]) if rank else worker
    agent.peers.find(on)  # if there is none, it says which there are
    return Place(on, str(torch.device(device if slash else "cpu")))


def _is_device(text: str) -> bool:
    try:
        torch.device(text)
    except RuntimeError:  # torch's word for "no device"
        return False
    return True


def check_device(device: str) -> torch.device:
    """The device, if this worker has it."""
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:  # each is what some kind of device raises
        accelerator = torch.accelerator.current_accelerator()
        there = ["cpu"]
        if accelerator is not None:
            there += [f"{accelerator.type}:{number}" for number in range(torch.accelerator.device_count())]
        raise TelegradError(
            f"worker {get_worker_info().name!r} has no device {device!r} to put a module on: {error}. It has "
            f"{', '.join(there)}"
        ) from error
    return torch.device(device)


def moved(value: Any, device: str | torch.device) -> Any:
    """The value with its tensors on the device, also those in lists, tuples, sets and dicts."""
    # A meta tensor has nothing to be moved.
    return mapped(value, lambda tensor: tensor if tensor.is_meta else tensor.to(device))


def mapped(value: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The value with a function applied to its tensors, also those in lists, tuples, sets, dicts and dataclasses."""
    return _mapped(value, function, set())


def _mapped(value: Any, function: Callable[[torch.Tensor], torch.Tensor], around: set[int]) -> Any:
    """The same, inside of containers with these ids: one that contains itself is left alone there."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if not isinstance(value, list | set | frozenset | tuple | dict | UserDict) and not _is_record(value):
        return value
    if id(value) in around:
        return value
    around.add(id(value))
    try:
        return _rebuilt(value, lambda item: _mapped(item, function, around))
    finally:
        around.discard(id(value))


def _is_record(value: object) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type | torch.nn.Module)


def _rebuilt(value: Any, change: Callable[[Any], Any]) -> Any:
    kind = type(value)
    if kind in (list, set, frozenset):
        return kind(change(item) for item in value)
    if isinstance(value, tuple):
        parts = [change(item) for item in value]
        return kind(*parts) if hasattr(value, "_fields") else kind(parts)
    items = list(value.items()) if isinstance(value, dict | UserDict) else []
    fields = []
    if _is_record(value):  # a dict may be one, too
        fields = [(field.name, getattr(value, field.name, None)) for field in dataclasses.fields(value)]
    changed = [(key, new) for key, item in items if (new := change(item)) is not item]
    changed_fields = [(name, new) for name, item in fields if (new := change(item)) is not item]
    if not changed and not changed_fields:
        return value
    result: Any = copy.copy(value)
    for key, new in changed:
        result[key] = new
    for name, new in changed_fields:
        object.__setattr__(result, name, new)
    return result
