"""The random number generators of a process: torch's, on the CPU and on accelerators, Python's and NumPy's."""

from __future__ import annotations

import importlib
import random
import sys
from typing import Any

import torch

RandomState = dict[str, Any]


def save() -> RandomState:
    """Return the state of all generators, as plain data and tensors."""
    state: RandomState = {"torch": torch.get_rng_state(), "python": random.getstate()}
    devices = _device_module()
    if devices is not None:
        state["devices"] = devices.get_rng_state_all()
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        kind, keys, position, has_gauss, gauss = numpy.random.get_state()
        state["numpy"] = kind, [int(key) for key in keys], position, has_gauss, gauss
    return state


def load(state: RandomState) -> None:
    """Set all generators that were saved and that this process has."""
    torch.set_rng_state(state["torch"])
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    devices = _device_module()
    if devices is not None and "devices" in state:
        devices.set_rng_state_all(state["devices"])
    if "numpy" in state:  # also if this process has not imported it yet
        importlib.import_module("numpy").random.set_state(tuple(state["numpy"]))


def _device_module() -> Any:
    """Return torch's module for the accelerators of this process, if there are any whose generators it can save."""
    if not torch.accelerator.is_available():
        return None
    module = torch.get_device_module()
    return module if hasattr(module, "get_rng_state_all") and hasattr(module, "set_rng_state_all") else None
