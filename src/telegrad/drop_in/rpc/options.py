"""Options of init_rpc under torch's names.

Options of TensorPipe that do not apply to telegrad (its transports and channels) are accepted and logged once.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping, Sequence
from functools import cache
from typing import TypeVar

import torch

from telegrad.drop_in.rpc.constants import (
    DEFAULT_INIT_METHOD,
    DEFAULT_NUM_WORKER_THREADS,
    DEFAULT_RPC_TIMEOUT_SEC,
)

DeviceType = int | str | torch.device
DeviceMap = Mapping[DeviceType, DeviceType]

_is_tensorpipe_available = True

__all__ = ["TensorPipeRpcBackendOptions"]

_log = logging.getLogger("telegrad")

OptionsT = TypeVar("OptionsT", bound="_TensorPipeRpcBackendOptionsBase")


class RpcBackendOptions:
    """Options of every backend: the default timeout of calls, and the rendezvous URL."""

    rpc_timeout: float
    init_method: str

    def __init__(self, rpc_timeout: float = DEFAULT_RPC_TIMEOUT_SEC, init_method: str = DEFAULT_INIT_METHOD) -> None:
        if isinstance(rpc_timeout, bool) or not isinstance(rpc_timeout, int | float):
            raise TypeError(
                "__init__(): incompatible constructor arguments. rpc_timeout is a number of seconds, and not "
                f"{rpc_timeout!r}"
            )
        self.rpc_timeout = rpc_timeout
        self.init_method = init_method


class _TensorPipeRpcBackendOptionsBase(RpcBackendOptions):
    """The options as torch's C++ takes them: by position, with devices already checked."""

    num_worker_threads: int
    device_maps: dict[str, dict[torch.device, torch.device]]
    devices: list[torch.device]

    def __init__(
        self,
        num_worker_threads: int = DEFAULT_NUM_WORKER_THREADS,
        _transports: Sequence[str] | None = None,
        _channels: Sequence[str] | None = None,
        rpc_timeout: float = DEFAULT_RPC_TIMEOUT_SEC,
        init_method: str = DEFAULT_INIT_METHOD,
        device_maps: Mapping[str, Mapping[torch.device, torch.device]] | None = None,
        devices: Sequence[torch.device] | None = None,
    ) -> None:
        super().__init__(rpc_timeout, init_method)
        if num_worker_threads < 1:
            raise ValueError(f"num_worker_threads must be positive, got {num_worker_threads}")
        self.num_worker_threads = num_worker_threads
        self.device_maps = {name: dict(device_map) for name, device_map in (device_maps or {}).items()}
        self.devices = list(devices or [])
        for name, given in (("_transports", _transports), ("_channels", _channels)):
            if given:
                _log_once(name)

    def _set_device_map(self, to: str, device_map: Mapping[torch.device, torch.device]) -> None:
        """Add to the device map for worker `to`."""
        self.device_maps.setdefault(to, {}).update(device_map)


class TensorPipeRpcBackendOptions(_TensorPipeRpcBackendOptionsBase):
    """Options of the default backend, telegrad's agent."""

    def __init__(
        self,
        *,
        num_worker_threads: int = DEFAULT_NUM_WORKER_THREADS,
        rpc_timeout: float = DEFAULT_RPC_TIMEOUT_SEC,
        init_method: str = DEFAULT_INIT_METHOD,
        device_maps: Mapping[str, DeviceMap] | None = None,
        devices: Sequence[DeviceType] | None = None,
        _transports: Sequence[str] | None = None,
        _channels: Sequence[str] | None = None,
    ) -> None:
        super().__init__(
            num_worker_threads,
            _transports,
            _channels,
            rpc_timeout,
            init_method,
            {name: _to_device_map(device_map) for name, device_map in (device_maps or {}).items()},
            _to_device_list(devices or []),
        )

    def set_device_map(self, to: str, device_map: DeviceMap) -> None:
        """Map devices of this worker to devices of worker `to`. The map must be one to one."""
        added = _to_device_map(device_map)
        existing = self.device_maps.get(to, {})
        for source, target in added.items():
            if source in existing and existing[source] != target:
                raise ValueError(
                    f"`set_device_map` only supports 1-to-1 mapping, trying to map {source} to {target} and "
                    f"{existing[source]}"
                )
        self._set_device_map(to, added)

    def set_devices(self, devices: Sequence[DeviceType]) -> None:
        """Set the devices of this worker that calls may use."""
        self.devices = _to_device_list(devices)


def frozen(options: OptionsT) -> OptionsT:
    """Return a copy for an agent, which later changes of the options do not reach."""
    made = copy.copy(options)
    made.devices = list(options.devices)
    made.device_maps = {
        name: {_canonical(source): _canonical(target) for source, target in device_map.items()}
        for name, device_map in options.device_maps.items()
    }
    return made


@cache
def _log_once(name: str) -> None:
    _log.info("telegrad ignores the TensorPipe option %s", name)


def _canonical(device: torch.device) -> torch.device:
    """Return a device as tensors name it: there is one CPU, and it has no index."""
    return torch.device("cpu") if device.type == "cpu" else device


def _to_device(device: DeviceType) -> torch.device:
    """Return a device of an accelerator: CUDA, or any other."""
    made = torch.device(device)
    if made.type in ("cpu", "meta"):
        raise ValueError(f"`set_devices` expect a list of CUDA devices, but got device type {made.type}.")
    return made


def _to_device_list(devices: Sequence[DeviceType]) -> list[torch.device]:
    return [_to_device(device) for device in devices]


def _to_device_map(device_map: DeviceMap) -> dict[torch.device, torch.device]:
    made: dict[torch.device, torch.device] = {}
    sources: dict[torch.device, torch.device] = {}
    for source, target in ((torch.device(key), torch.device(value)) for key, value in device_map.items()):
        if target in sources:
            raise ValueError(
                f"`device_map` only supports 1-to-1 mapping, trying to map {source} and {sources[target]} to {target}"
            )
        made[source] = target
        sources[target] = source
    return made
