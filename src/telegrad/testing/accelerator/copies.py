"""Counts the copies to, from and on the simulated devices, and delays them."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, fields

from telegrad.testing.accelerator.loading import loaded


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


def set_asynchronous(enabled: bool) -> None:
    """Delay the non-blocking copies between devices and pinned memory for as long as the program allows it.

    A copy then takes effect on the device when its stream continues with an operator, and on the host when the host
    synchronizes with the stream, with a later event or with the device. A program that forgets to synchronize sees
    wrong data: new memory is filled with NaN. `set_asynchronous(False)` completes all copies.
    """
    loaded().telegrad_sim_set_asynchronous(int(enabled))


def copies() -> Copies:
    """Return what was copied since `reset_copies`, by all threads of this process."""
    return _read_copies(reset=False)


def reset_copies() -> Copies:
    """Set the counters of `copies` to zero, and return what they were."""
    return _read_copies(reset=True)


def _read_copies(reset: bool) -> Copies:
    values = (ctypes.c_int64 * len(fields(Copies)))()
    loaded().telegrad_sim_copies(values, int(reset))
    return Copies(*values)
