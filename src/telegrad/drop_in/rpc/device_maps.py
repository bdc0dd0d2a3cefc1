"""Device maps as torch has them: all are checked when a group forms, and only what they name leaves the CPU.

Every worker reports every mistake, whichever worker made it. Torch checks CUDA devices, and we check those of whichever
accelerator a worker has.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from telegrad.agent.agent import Agent
from telegrad.drop_in.rpc.agents import TensorPipeAgent, get_current_agent
from telegrad.drop_in.rpc.options import _TensorPipeRpcBackendOptionsBase
from telegrad.errors import PayloadError
from telegrad.wire.devices import DeviceCounts, DevicePairs, Placement, has_device


@dataclass(frozen=True)
class NamedDevice:
    """A device of any worker, shown as torch shows it. Torch knows only devices whose backend this process loaded."""

    type: str
    index: int | None

    def __repr__(self) -> str:
        return f"device(type={self.type!r}" + (")" if self.index is None else f", index={self.index})")


Map = dict[NamedDevice, NamedDevice]
Config = tuple[DeviceCounts, dict[str, Map], list[NamedDevice]]
"""The devices of one worker, its device maps, and the devices that calls may use, if it was told."""


class TorchPlacement(Placement):
    """Where the tensors of messages under the drop-in belong. A device that is not in the map cannot be sent from."""

    __slots__ = ()

    def unmapped(self, x: torch.Tensor) -> str:
        """Return the CPU for a tensor on the CPU. Raise torch's error for one on another device."""
        if x.is_cpu:
            return "cpu"
        found = (
            f" for device {x.device} but received a tensor on that device."
            if self.pairs
            else f", but found tensor on device: {x.device}"
        )
        raise PayloadError(
            "TensorPipe RPC backend only supports CPU tensors by default, please move your tensors to CPU before "
            "sending them over RPC, or call `set_device_map` on `TensorPipeRpcBackendOptions` to explicitly configure "
            f"device mapping. {'Response' if self.is_reply else 'Request'} device mapping is not available for "
            f"destination {self.receiver}{found}"
        )


def use_device_maps(agent: Agent, options: _TensorPipeRpcBackendOptionsBase) -> None:
    """Have the messages of an agent that has not started follow the device maps of its options."""
    agent.local.placement = TorchPlacement
    # A map that is not one to one has no reverse. `check_device_maps` refuses it, and sends messages for that.
    agent.local.device_maps = {
        name: _pairs(device_map) for name, device_map in options.device_maps.items() if _is_one_to_one(device_map)
    }


def _pairs(device_map: Mapping[torch.device, torch.device]) -> DevicePairs:
    return tuple([(str(source), str(target)) for source, target in device_map.items()])


def _is_one_to_one(device_map: Mapping[Any, Any]) -> bool:
    return len(set(device_map.values())) == len(device_map)


# -- the check --------------------------------------------------------------------------------------------------------


def device_config() -> Config:
    """Return what other workers check of this worker."""
    agent: TensorPipeAgent = get_current_agent()
    return config_of(agent.agent.me.devices, agent._get_backend_options())


def config_of(available: DeviceCounts, options: _TensorPipeRpcBackendOptionsBase) -> Config:
    """Return what is checked of a worker with these devices and options."""
    maps = {
        name: {_named(source): _named(target) for source, target in device_map.items()}
        for name, device_map in options.device_maps.items()
    }
    return available, maps, [_named(device) for device in options.devices]


def _named(device: torch.device) -> NamedDevice:
    return NamedDevice(device.type, device.index)


def check_device_maps(configs: Mapping[str, Config], *, static: bool = True) -> None:
    """Raise a ValueError if the device maps of any worker are invalid.

    In a dynamic group, maps may name workers that have not joined yet.
    """
    for name in configs:
        _check_devices(name, configs)
    for name, (_, maps, _) in configs.items():
        if static and not set(maps) <= set(configs):
            raise ValueError(
                f"Node {name} has invalid target node names in its device maps\ndevice maps = {maps.keys()}\n"
                f"node names = {list(configs)}"
            )
        for target in maps:
            _check_map(name, target, configs)


def _exist(devices: Iterable[NamedDevice], available: DeviceCounts) -> bool:
    return all(
        device == NamedDevice("cpu", None) or (device.index is not None and has_device(available, device))
        for device in devices
    )


def _check_devices(name: str, configs: Mapping[str, Config]) -> None:
    available, _, devices = configs[name]
    if len(set(devices)) != len(devices):
        raise ValueError(f"Node {name} has duplicated devices\ndevices = {devices}")
    if not _exist(devices, available):
        raise ValueError(
            f"Node {name} has devices with invalid indices\ndevices = {devices}\ndevice count = {_count(available)}"
        )


def _check_map(name: str, target: str, configs: Mapping[str, Config]) -> None:
    device_map = configs[name][1][target]
    about = f"in its device map for {target}\ndevice map = {device_map}"
    if not _is_one_to_one(device_map):
        raise ValueError(f"Node {name} has duplicated target devices {about}")
    for side, worker, used in (("source", name, device_map.keys()), ("target", target, device_map.values())):
        if worker not in configs:
            continue  # it has not joined yet
        available, _, devices = configs[worker]
        if devices and not set(used) <= set(devices):
            raise ValueError(f"Node {name} has unexpected {side} devices {about}\ndevices = {devices}")
        if not devices and not _exist(used, available):
            raise ValueError(
                f"Node {name} has {side} devices with invalid indices {about}\ndevice count = {_count(available)}"
            )


def _count(available: DeviceCounts) -> int:
    return sum(count for _, count in available)
