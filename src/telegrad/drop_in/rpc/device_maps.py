"""Checks the device maps of all workers when a group forms, as torch does: every worker reports every mistake."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from telegrad.agent.agent import Agent
from telegrad.drop_in.rpc.options import _TensorPipeRpcBackendOptionsBase

Maps = dict[str, dict[torch.device, torch.device]]
Config = tuple[int, Maps, list[torch.device]]
"""The number of CUDA devices of one worker, its device maps, and the devices that calls may use."""


def check_device_maps(agent: Agent, options: _TensorPipeRpcBackendOptionsBase) -> None:
    """Raise a ValueError if the device maps of any worker are invalid. All workers must call this."""
    mine: Config = (torch.cuda.device_count(), options.device_maps, options.devices)
    configs: dict[str, Config] = agent.gather(mine)
    for name in configs:
        _check_devices(name, configs)
    for name, (_, maps, _) in configs.items():
        if not set(maps) <= set(configs):
            raise ValueError(
                f"Node {name} has invalid target node names in its device maps\ndevice maps = {maps.keys()}\n"
                f"node names = {list(configs)}"
            )
        for target in maps:
            _check_map(name, target, configs)


def _exist(devices: Iterable[torch.device], count: int) -> bool:
    return all(device.type == "cpu" or (device.type == "cuda" and 0 <= device.index < count) for device in devices)


def _check_devices(name: str, configs: dict[str, Config]) -> None:
    count, _, devices = configs[name]
    if len(set(devices)) != len(devices):
        raise ValueError(f"Node {name} has duplicated devices\ndevices = {devices}")
    if not _exist(devices, count):
        raise ValueError(f"Node {name} has devices with invalid indices\ndevices = {devices}\ndevice count = {count}")


def _check_map(name: str, target: str, configs: dict[str, Config]) -> None:
    device_map = configs[name][1][target]
    about = f"in its device map for {target}\ndevice map = {device_map}"
    if len(set(device_map.values())) != len(device_map):
        raise ValueError(f"Node {name} has duplicated target devices {about}")
    for side, worker, used in (("source", name, device_map.keys()), ("target", target, device_map.values())):
        count, _, devices = configs[worker]
        if devices and not set(used) <= set(devices):
            raise ValueError(f"Node {name} has unexpected {side} devices {about}\ndevices = {devices}")
        if not devices and not _exist(used, count):
            raise ValueError(f"Node {name} has {side} devices with invalid indices {about}\ndevice count = {count}")
