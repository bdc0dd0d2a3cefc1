"""Loads the simulated accelerator into torch, once for each process."""

from __future__ import annotations

import atexit
import ctypes
import os
import sys
import threading
import time
from pathlib import Path

import torch
from torch.utils import backend_registration

from telegrad.errors import TelegradError
from telegrad.testing.accelerator import backend, build, cells

DEVICE_TYPE = "sim"
"""The type of the devices: `torch.device("sim", 0)`. Torch's module for them is `torch.sim`."""


_lock = threading.Lock()  # protects _library
_library: ctypes.CDLL | None = None


def why_unavailable() -> str | None:
    """Return why `install` cannot work on this machine, or None if it can. Nothing is compiled."""
    return None if _library is not None else build.why_impossible()


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


def loaded() -> ctypes.CDLL:
    """Return the library of the installed accelerator."""
    if _library is None:
        raise TelegradError("this process has no simulated devices; call telegrad.testing.accelerator.install() first")
    return _library


def _load(devices: int) -> ctypes.CDLL:
    path = build.build()
    try:
        backend_registration.rename_privateuse1_backend(DEVICE_TYPE)
    except RuntimeError as error:
        raise TelegradError(
            "the simulated accelerator cannot be installed: this process has another backend on torch's PrivateUse1 key"
        ) from error
    library = ctypes.CDLL(str(path))  # calls release the GIL, which the engine's new threads need
    most = library.telegrad_sim_max_devices()
    if not 1 <= devices <= most:
        raise TelegradError(f"the simulated accelerator has 1 to {most} devices, not {devices}")
    library.telegrad_sim_install(devices)
    backend.device_count = library.telegrad_sim_devices
    # As torch's function for this does, whose name is private.
    sys.modules[f"torch.{DEVICE_TYPE}"] = backend
    setattr(torch, DEVICE_TYPE, backend)
    backend_registration.generate_methods_for_privateuse1_backend()
    cells.register()
    atexit.register(_stop_engine, library, os.getpid())
    return library


def _stop_engine(library: ctypes.CDLL, pid: int) -> None:
    """End the engine's threads, in at most 10 seconds.

    If one of them needs the GIL after the interpreter has begun to end, Python 3.11 aborts the process.
    """
    if os.getpid() != pid:  # a forked child does not have these threads
        return
    library.telegrad_sim_stop_engine()
    deadline = time.monotonic() + 10.0
    while _engine_threads_left() and time.monotonic() < deadline:  # the engine does not wait for their last lines
        time.sleep(0.001)


def _engine_threads_left() -> bool:
    for name in Path("/proc/self/task").glob("*/comm"):
        try:
            if name.read_text().startswith("pt_autograd_"):
                return True
        except OSError:
            continue  # the thread has ended since
    return False
