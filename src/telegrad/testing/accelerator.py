"""A simulated accelerator, for tests of programs with devices on machines without one.

`install` adds the devices `sim:0`, `sim:1`, ... to torch, as a C++ extension on torch's PrivateUse1 key would. They have
memory of their own type, streams, events and pinned memory. Operators run on the CPU, but tensors have to be on one
device, as on CUDA. Torch's autograd engine has a thread for each device.

>>> if why_unavailable() is None:
...     install()
...     assert torch.ones(2, device="sim:1").sum().item() == 2

The extension (accelerator.cpp) is compiled at the first call on a machine, in about 20 seconds, and cached.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from dataclasses import dataclass

import torch

from telegrad.errors import TelegradError
from telegrad.testing import accelerator_backend, accelerator_build

__all__ = ["DEVICE_TYPE", "Copies", "copies", "install", "reset_copies", "set_asynchronous", "why_unavailable"]

DEVICE_TYPE = "sim"
"""The type of the devices: `torch.device("sim", 0)`. Torch's module for them is `torch.sim`."""


@dataclass(frozen=True)
class Copies:
    """What was copied to, from and on the devices since `reset_copies`, and how often the host waited.

    Copies are those that a program asks for with `to`, `copy_`, `clone`, `item` and the like. What operators read and
    write does not count.
    """

    host_to_device: int
    """Bytes."""
    device_to_host: int
    """Bytes."""
    within_device: int
    """Bytes, by `clone`, `contiguous` and the like."""
    between_devices: int
    """Bytes."""
    count: int
    """How many copies there were."""
    non_blocking: int
    """How many of them did not make the host wait: `non_blocking=True`, between a device and pinned memory, with the
    same dtype and strides on both sides."""
    synchronizations: int
    """How often the host synchronized with a stream, an event or a device."""


_lock = threading.Lock()  # protects _library
_library: ctypes.CDLL | None = None


def why_unavailable() -> str | None:
    """Return why `install` cannot work on this machine, or None if it can. Nothing is compiled."""
    return None if _library is not None else accelerator_build.why_impossible()


def install(devices: int = 2) -> None:
    """Add the devices `sim:0`, `sim:1`, ... to torch in this process. They cannot be removed.

    Each process calls this for itself. A second call does nothing, and raises `TelegradError` if the number of devices
    differs. Do not call it while another thread runs a backward pass.
    """
    global _library
    with _lock:
        if _library is None:
            _library = _load(devices)
        elif devices != (installed := _library.telegrad_sim_devices()):
            raise TelegradError(
                f"this process has {installed} simulated devices, and cannot change that to {devices}; "
                "call telegrad.testing.accelerator.install once, or in another process"
            )


def set_asynchronous(enabled: bool) -> None:
    """Delay the non-blocking copies between devices and pinned memory for as long as the program allows it.

    A copy then takes effect on the device when its stream continues with an operator, and on the host when the host
    synchronizes with the stream, with a later event or with the device. A program that forgets to synchronize sees
    wrong data: new memory is filled with NaN. `set_asynchronous(False)` completes all copies.
    """
    _installed().telegrad_sim_set_asynchronous(int(enabled))


def copies() -> Copies:
    """Return what was copied since `reset_copies`, by all threads of this process."""
    return _read_copies(reset=False)


def reset_copies() -> Copies:
    """Set the counters of `copies` to zero, and return what they were."""
    return _read_copies(reset=True)


def _read_copies(reset: bool) -> Copies:
    values = (ctypes.c_int64 * len(Copies.__dataclass_fields__))()
    _installed().telegrad_sim_copies(values, int(reset))
    return Copies(*values)


def _installed() -> ctypes.CDLL:
    if _library is None:
        raise TelegradError("this process has no simulated devices; call telegrad.testing.accelerator.install() first")
    return _library


def _load(devices: int) -> ctypes.CDLL:
    path = accelerator_build.build()
    try:
        torch.utils.rename_privateuse1_backend(DEVICE_TYPE)
    except RuntimeError as error:
        raise TelegradError(
            "the simulated accelerator cannot be installed: this process has another backend on torch's PrivateUse1 key"
        ) from error
    library = ctypes.CDLL(str(path))  # calls release the GIL, which the engine's new threads need
    most = library.telegrad_sim_max_devices()
    if not 1 <= devices <= most:
        raise TelegradError(f"the simulated accelerator has 1 to {most} devices, not {devices}")
    library.telegrad_sim_install(devices)
    accelerator_backend.device_count = library.telegrad_sim_devices
    # As torch's function for this does, whose name is private.
    sys.modules[f"torch.{DEVICE_TYPE}"] = accelerator_backend
    setattr(torch, DEVICE_TYPE, accelerator_backend)
    torch.utils.generate_methods_for_privateuse1_backend()
    return library
