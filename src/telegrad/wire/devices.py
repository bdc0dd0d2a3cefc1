"""Where the tensors of a message belong on its receiver.

A *device map* maps devices of one worker to devices of another, one to one. A caller's requests follow its map for the
callee, the replies follow the reverse, and the gradient of a tensor goes back to the device that the tensor was sent
from. Whatever the map does not name keeps its device, if the receiver has that. The sender decides all of this, so a
mistake is an error before anything is sent.

>>> placement = Placement("worker0", "worker1", (("cuda", 2),), (("cuda:0", "cuda:1"),))
>>> placement.target_of(torch.ones(2))
''
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch

from telegrad.errors import PayloadError, ProtocolError

DeviceMap = Mapping[str | int | torch.device, str | int | torch.device]
"""A device map as users write it."""
DevicePairs = tuple[tuple[str, str], ...]
"""A device map: devices of the caller and of the callee."""
DeviceCounts = tuple[tuple[str, int], ...]
"""The devices of a worker: types, and how many there are of each. All workers have the CPU."""
MAX_PAIRS = 256
"""Most pairs in a device map that a peer sends."""
_MAX_NAME = 64  # characters of a device that a peer names
_MOST_NAMED = 8  # devices of one type in an error, and types: a peer may claim to have any number


class DirectPath(Protocol):
    """Passes tensors from a device to another process without a copy through host memory."""

    kind: str
    """The type of device."""

    def share(self, x: torch.Tensor) -> bytes:
        """Return a handle of a copy of the tensor, which lives until the receiver needs it no more."""
        ...

    def open(self, handle: bytes) -> torch.Tensor:
        """Return the tensor of a handle that another process made."""
        ...


class Targets(Protocol):
    """Says where tensors belong on their receiver."""

    direct: DirectPath | None
    """The path to the receiver that avoids host memory, if there is one."""
    moves_cpu: bool
    """Whether tensors of the CPU may belong on another device."""

    def targets(self, tensors: Sequence[Any]) -> list[str]:
        """Return the device of each tensor on the receiver; empty for the CPU, and for what is not a tensor."""
        ...


class Placement:
    """Where tensors of the messages from one worker to another belong."""

    __slots__ = ("_available", "_map", "direct", "is_reply", "moves_cpu", "pairs", "receiver", "sender")

    def __init__(
        self,
        sender: str,
        receiver: str,
        available: DeviceCounts,
        pairs: DevicePairs = (),
        *,
        is_reply: bool = False,
        direct: DirectPath | None = None,
    ) -> None:
        self.sender, self.receiver = sender, receiver
        self.is_reply = is_reply
        self.direct = direct
        self.pairs = pairs
        """Devices of the sender and of the receiver."""
        self._available = available
        self._map = dict(pairs)
        self.moves_cpu = self._map.get("cpu", "cpu") != "cpu"

    def targets(self, tensors: Sequence[Any]) -> list[str]:
        """Return the device of each tensor on the receiver; empty for the CPU, and for what is not a tensor."""
        return [self.target_of(x) if isinstance(x, torch.Tensor) else "" for x in tensors]

    def target_of(self, x: torch.Tensor) -> str:
        """Return the device of a tensor on the receiver; empty for the CPU. Raise PayloadError if there is none."""
        device = x.device
        if device.type == "meta":
            return ""
        target = self._map.get(str(device))
        if target is None:
            target = self.unmapped(x)
        return "" if target == "cpu" else target

    def unmapped(self, x: torch.Tensor) -> str:
        """Return the device of a tensor whose device is not in the map."""
        device = x.device
        if device.type == "cpu" or has_device(self._available, device):
            return str(device)
        raise PayloadError(
            f"a tensor of shape {list(x.shape)} is on {device} of worker {self.sender!r}, but worker "
            f"{self.receiver!r} has no {device} ({describe_devices(self._available)}). {self._remedy(device)}"
        )

    def _remedy(self, device: torch.device) -> str:
        if self.is_reply:
            return (
                f"Say where results go with Options(device_maps={{{self.sender!r}: {{'cpu': '{device}'}}}}) on worker "
                f"{self.receiver!r}, or return the tensor from the CPU"
            )
        return (
            f"Map the device with Options(device_maps={{{self.receiver!r}: {{'{device}': 'cpu'}}}}) or with device_map "
            "in the call, or send the tensor from the CPU"
        )


class _SameDevice:
    """Every tensor keeps its device."""

    moves_cpu = False
    direct: DirectPath | None = None

    def targets(self, tensors: Sequence[Any]) -> list[str]:
        """Return the device of each tensor."""
        return [
            str(x.device) if isinstance(x, torch.Tensor) and x.device.type not in ("cpu", "meta") else ""
            for x in tensors
        ]


SAME_DEVICE: Targets = _SameDevice()
"""Every tensor keeps its device, whether the receiver has that or not."""


class GradientTargets:
    """The devices that gradients go back to."""

    __slots__ = ("_devices", "direct", "moves_cpu")

    def __init__(self, devices: Sequence[str], direct: DirectPath | None = None) -> None:
        self._devices = devices
        self.direct = direct
        self.moves_cpu = any(devices)

    def targets(self, tensors: Sequence[Any]) -> list[str]:
        """Return the device of each gradient on the receiver."""
        return list(self._devices) if self._devices else [""] * len(tensors)


TO_CPU = GradientTargets(())
"""All gradients go back to the CPU."""


def reversed_pairs(pairs: DevicePairs) -> DevicePairs:
    """Return the map for replies."""
    return tuple([(theirs, ours) for ours, theirs in pairs])


def source_devices(tensors: Iterable[torch.Tensor]) -> tuple[str, ...]:
    """Return the devices that these tensors are sent from; empty if it is the CPU for all of them."""
    devices = tuple(["" if x.is_cpu else str(x.device) for x in tensors])
    return devices if any(devices) else ()


class Device(Protocol):
    """A `torch.device`, or one that this process cannot make because it did not load the backend."""

    @property
    def type(self) -> str: ...
    @property
    def index(self) -> int | None: ...


def has_device(available: DeviceCounts, device: Device) -> bool:
    """Whether a worker with these devices has this one.

    >>> has_device((("cuda", 2),), torch.device("cuda:1")), has_device((), torch.device("cuda:0"))
    (True, False)
    """
    if device.type == "cpu":
        return True
    return any(kind == device.type and 0 <= (device.index or 0) < count for kind, count in available)


def parse_device_map(device_map: Mapping[Any, Any], what: str) -> DevicePairs:
    """Return a device map that a user wrote. `what` names it in errors.

    >>> parse_device_map({"cuda:0": "cuda:1", "cpu": torch.device("cpu")}, "the map")
    (('cuda:0', 'cuda:1'), ('cpu', 'cpu'))
    """
    if not isinstance(device_map, Mapping):
        raise TypeError(f"{what} must map devices to devices, such as {{'cuda:0': 'cuda:1'}}, not {device_map!r}")
    pairs: dict[str, str] = {}
    sources: dict[str, str] = {}
    for ours, theirs in device_map.items():
        source, target = _parse_device(ours, what), _parse_device(theirs, what)
        if source in pairs:
            raise ValueError(f"{what} names {source} twice: each device maps to one other")
        if target in sources:
            raise ValueError(
                f"{what} maps both {sources[target]} and {source} to {target}: it must be one to one, because results "
                "and gradients go back by its reverse"
            )
        pairs[source], sources[target] = target, source
    return tuple(pairs.items())


def _parse_device(given: Any, what: str) -> str:
    if isinstance(given, bool) or not isinstance(given, str | int | torch.device):
        raise TypeError(f"{what} contains {given!r}, which is not a device such as 'cuda:0'")
    try:
        device = torch.device(given)
    except (RuntimeError, ValueError) as error:  # a ValueError for a number of more than 64 bits
        raise ValueError(
            f"{what} contains {given!r}, which is not a device: {error}. "
            "A backend that is not part of torch must be loaded first"
        ) from error
    if device.type == "cpu":
        return "cpu"
    if device.type == "meta":
        raise ValueError(f"{what} contains 'meta', which has no memory: map devices that have")
    if device.index is None:
        raise ValueError(f"{what} contains {given!r} without an index: write {device.type}:0")
    return str(device)


def check_received_pairs(pairs: DevicePairs) -> DevicePairs:
    """Return a device map that a peer sent, or raise ProtocolError."""
    if len(pairs) > MAX_PAIRS:
        raise ProtocolError(f"a peer sent a device map of {len(pairs)} pairs; the limit is {MAX_PAIRS}")
    if any(len(name) > _MAX_NAME for pair in pairs for name in pair):
        raise ProtocolError(f"a peer sent a device map with a name of more than {_MAX_NAME} characters")
    if len({ours for ours, _ in pairs}) < len(pairs) or len({theirs for _, theirs in pairs}) < len(pairs):
        raise ProtocolError("a peer sent a device map that is not one to one")
    return pairs


def check_received_sources(devices: tuple[str, ...], count: int) -> tuple[str, ...]:
    """Return the source devices of `count` received tensors, or raise ProtocolError."""
    if devices and len(devices) != count:
        raise ProtocolError(f"a peer named {len(devices)} devices for {count} tensors")
    if any(len(name) > _MAX_NAME for name in devices):
        raise ProtocolError(f"a peer named a device with more than {_MAX_NAME} characters")
    return devices


def check_pairs_exist(
    pairs: DevicePairs, me: str, mine: DeviceCounts, peer: str, theirs: DeviceCounts, what: str
) -> None:
    """Raise ValueError if a device map names a device that its worker does not have."""
    for ours, target in pairs:
        for worker, available, name in ((me, mine, ours), (peer, theirs, target)):
            if not has_device(available, torch.device(name)):
                raise ValueError(
                    f"{what} of worker {me!r} for worker {peer!r} maps {ours} to {target}, but worker {worker!r} has "
                    f"no {name} ({describe_devices(available)})"
                )


def describe_devices(available: DeviceCounts) -> str:
    """Return the accelerators of a worker in words.

    >>> describe_devices((("cuda", 2),)), describe_devices(())
    ('its accelerators: cuda:0, cuda:1', 'it has no accelerator, or its backend was not loaded before init_rpc')
    """
    names = []
    for kind, count in available[:_MOST_NAMED]:
        shown = shortened_name(kind)
        names += [f"{shown}:{index}" for index in range(min(count, _MOST_NAMED))]
        if count > _MOST_NAMED:
            names.append(f"... {shown}:{count - 1}")
    return (
        f"its accelerators: {', '.join(names)}"
        if names
        else "it has no accelerator, or its backend was not loaded before init_rpc"
    )


def shortened_name(name: str) -> str:
    """Return a name of a device that a peer sent, for an error."""
    return name if len(name) <= _MAX_NAME else f"{name[:_MAX_NAME]}..."


def local_devices() -> DeviceCounts:
    """Return the accelerators of this process."""
    accelerator = torch.accelerator.current_accelerator()
    count = torch.accelerator.device_count() if accelerator is not None else 0
    return ((accelerator.type, count),) if accelerator is not None and count else ()


def own_device(name: str) -> torch.device | None:
    """Return the device of this process that a peer named; None if there is no such.

    The name is not passed to torch: it may be of any length, and torch would load the backend that it names.
    """
    if name == "cpu":
        return torch.device("cpu")
    if len(name) > _MAX_NAME:
        return None
    kind, _, number = name.partition(":")
    for own, count in local_devices():
        if kind == own and number.isdecimal() and int(number) < count:
            return torch.device(own, int(number))
    return None
