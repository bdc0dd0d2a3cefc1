"""Copy tensors between devices and host memory, with torch's device-independent functions.

All copies of a message are started first, on the current streams of their devices, and waited for once. After that the
host memory and the tensors are free for any thread and any stream: nothing has to remember an event.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence

import msgspec
import torch

from telegrad.errors import PayloadError
from telegrad.wire.descriptors import ALIGNMENT, COPIED_AS_BYTES
from telegrad.wire.devices import describe_devices, local_devices, own_device, shortened_name

PINNED_FROM = 64 * 1024
"""So many bytes of a message are copied through pinned memory, which devices can write without help of the CPU."""


class DeviceCopy(msgspec.Struct):
    """A tensor on a device, and its place in the region."""

    offset: int
    source: torch.Tensor
    stride: tuple[int, ...]  # on the receiver

    @property
    def nbytes(self) -> int:
        return int(self.source.nbytes)

    def place(self, memory: torch.Tensor, offset: int) -> torch.Tensor:
        """Return the tensor in host memory, at an offset, that this one is copied to."""
        source = self.source
        target = memory[offset : offset + source.nbytes].view(source.dtype)
        return target.as_strided(source.shape, self.stride) if self.stride else target.view(source.shape)


def copy_to_host(copies: Sequence[DeviceCopy], region: memoryview) -> None:
    """Copy tensors from their devices into the region."""
    total = sum([_aligned(copy.nbytes) for copy in copies])
    pinned = _pinned(total) if total >= PINNED_FROM else None
    if pinned is None:
        memory = torch.frombuffer(region, dtype=torch.uint8)
        for copy in copies:
            copy.place(memory, copy.offset).copy_(copy.source, non_blocking=True)
        wait_for({copy.source.device for copy in copies})
        return
    offset = 0
    for copy in copies:
        copy.place(pinned, offset).copy_(copy.source, non_blocking=True)
        offset += _aligned(copy.nbytes)
    wait_for({copy.source.device for copy in copies})
    start, offset = ctypes.addressof(ctypes.c_char.from_buffer(region)), 0
    for copy in copies:
        ctypes.memmove(start + copy.offset, pinned.data_ptr() + offset, copy.nbytes)
        offset += _aligned(copy.nbytes)


class ToDevices:
    """Copies received tensors from host memory to devices."""

    __slots__ = ("_devices", "_sources")

    def __init__(self) -> None:
        self._devices: set[torch.device] = set()
        self._sources: list[torch.Tensor] = []  # they must live until the copies are done

    def copy(self, x: torch.Tensor, device: str) -> torch.Tensor:
        """Start copying a tensor to a device of this worker. Raise PayloadError if there is no such device."""
        target = own_device(device)
        if target is None:
            raise PayloadError(
                f"a received tensor of shape {list(x.shape)} belongs on {shortened_name(device)!r}, but this worker "
                f"has no such device ({describe_devices(local_devices())}). Map it to another device with a device "
                "map, or send it from the CPU"
            )
        try:
            if x.dtype in COPIED_AS_BYTES:
                moved = x.view(torch.uint8).to(target, non_blocking=True).view(x.dtype)
            else:
                moved = x.to(target, non_blocking=True)
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, TypeError) as error:  # a TypeError if the device lacks the dtype, as "mps" lacks float64
            raise PayloadError(
                f"a received tensor of shape {list(x.shape)} and {x.dtype} belongs on {device!r}, but this worker "
                f"cannot copy it there: {error}. Map it to another device with a device map, or send it from the CPU"
            ) from error
        self._devices.add(moved.device)
        self._sources.append(x)
        return moved

    def wait(self) -> None:
        """Wait until all copies are done."""
        if self._devices:
            wait_for(self._devices)
            self._sources.clear()


def wait_for(devices: Iterable[torch.device]) -> None:
    """Wait for what the current streams of these devices have been given."""
    for device in devices:
        if device.type not in ("cpu", "meta"):
            try:
                torch.accelerator.current_stream(device).synchronize()
            except RuntimeError:  # "mps" cannot wait for a stream. An error of the device is raised again.
                torch.accelerator.synchronize(device)


def _pinned(size: int) -> torch.Tensor | None:
    """Return pinned memory, which torch pools; None if the accelerator has none, or the system allows no more."""
    try:
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)
    except RuntimeError:
        return None


def _aligned(size: int) -> int:
    return (size + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT


def memory_of(x: torch.Tensor, address: int, nbytes: int) -> torch.Tensor:
    """Return memory of a tensor's storage, from an address on its device, as bytes."""
    storage = x.untyped_storage()
    if address + nbytes > storage.data_ptr() + storage.nbytes():  # torch would resize it
        raise PayloadError(
            f"tensors on {x.device} that overlap, but belong to different storages, cannot be sent together: send them "
            "in separate calls"
        )
    flat = torch.empty(0, dtype=torch.uint8, device=x.device)
    flat.set_(storage, address - storage.data_ptr(), (nbytes,))  # type: ignore[call-overload]  # torch's types lack it
    return flat
