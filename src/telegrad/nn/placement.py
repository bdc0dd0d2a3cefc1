"""Where a module is placed: "worker", "worker/cuda:0" or "rank:1/cpu", as users write it."""

from __future__ import annotations

import re

import msgspec
import torch

from telegrad.default_agent import default_agent
from telegrad.errors import TelegradError
from telegrad.rpc.api import get_worker_info
from telegrad.wire.devices import describe_devices, has_device, local_devices

_RANK = re.compile(r"rank:(\d+)\Z")


class RemoteDevice(msgspec.Struct, frozen=True):
    """A device of a worker."""

    worker: str | int
    """The worker's name, or its id if it was given as a rank."""
    device: str


def parse_remote_device(text: str | torch.device) -> RemoteDevice:
    """Parse a placement. A device alone ("cpu", "cuda:1") is on this worker; a worker alone means its CPU.

    Raises if the worker is not in the group or the device is malformed. See `check_available` for missing devices.
    """
    if isinstance(text, torch.device):
        return RemoteDevice(get_worker_info().name, str(text))
    if not isinstance(text, str):
        raise TypeError(f"remote_device must be a string such as 'worker1/cpu', not {text!r}")
    worker, slash, device = text.partition("/")
    if not worker or "/" in device:
        raise ValueError(
            f"Could not parse remote_device: {text}. The valid format is '<workername>/<device>' or "
            "'rank:<rank>/<device>' or '<device>'"
        )
    agent = default_agent()
    names = {record.name for record in agent.peers.records()}
    if not slash and worker not in names and _is_device(worker):
        return RemoteDevice(agent.me.name, str(torch.device(worker)))
    rank = _RANK.match(worker) if worker not in names else None
    name_or_id = int(rank[1]) if rank else worker
    agent.peers.find(name_or_id)  # raises for an unknown worker, and lists the known ones
    try:
        return RemoteDevice(name_or_id, str(torch.device(device if slash else "cpu")))
    except RuntimeError as error:  # torch's, which programs match
        error.add_note(
            f"in remote_device {text!r}. A backend that is not part of torch must be loaded on this worker, too"
        )
        raise


def check_available(target: RemoteDevice) -> RemoteDevice:
    """Return the placement. Raises if the worker had no such device when it joined the group."""
    record = default_agent().peers.find(target.worker).record
    device = torch.device(target.device)
    if device.type != "meta" and not has_device(record.devices, device):
        raise TelegradError(
            f"worker {record.name!r} has no device {target.device!r} for a module "
            f"({describe_devices(record.devices)}). Place it on a device that the worker has, such as "
            f"'{record.name}/cpu'"
        )
    return target


def _is_device(text: str) -> bool:
    try:
        torch.device(text)
    except RuntimeError:  # raised by torch for a malformed device
        return False
    return True


def check_device(device: str) -> torch.device:
    """Return the device, with its index. Raises if this worker lacks it."""
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError, NotImplementedError) as error:  # depends on the kind of device
        raise TelegradError(
            f"worker {get_worker_info().name!r} has no device {device!r} for a module "
            f"({describe_devices(local_devices())}): {error}"
        ) from error
