"""The random number generators of a process: torch's, on the CPU and on accelerators, Python's and NumPy's."""

from __future__ import annotations

import importlib
import random
import sys
from typing import Any

import torch

from telegrad.errors import TelegradError

RandomState = dict[str, Any]


def save() -> RandomState:
    """Return the state of all generators, as plain data and tensors."""
    state: RandomState = {"torch": torch.get_rng_state(), "python": random.getstate()}
    devices = _device_module()
    if devices is not None:
        state["devices"] = devices.get_rng_state_all()
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        state["numpy"] = _plain(numpy.random.get_state(legacy=False))
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
        _load_numpy(importlib.import_module("numpy").random, state["numpy"])


def _load_numpy(module: Any, state: dict[str, Any]) -> None:
    kind = state["bit_generator"]
    if kind != module.get_state(legacy=False)["bit_generator"]:  # the program has set another one than NumPy's own
        if not hasattr(module, kind):
            raise TelegradError(
                f"NumPy's global generator was a {kind}, which NumPy does not have: set it with "
                "numpy.random.set_bit_generator() when the program starts, on every worker"
            )
        module.set_bit_generator(getattr(module, kind)())
    module.set_state(state)


def _plain(state: Any) -> Any:
    """Return a state of NumPy without arrays, which a snapshot on disk must not have."""
    if isinstance(state, dict):
        return {key: _plain(each) for key, each in state.items()}
    return state.tolist() if hasattr(state, "tolist") else state


def _device_module() -> Any:
    """Return torch's module for the accelerators of this process, if there are any whose generators it can save."""
    if not torch.accelerator.is_available():
        return None
    module = torch.get_device_module()
    return module if hasattr(module, "get_rng_state_all") and hasattr(module, "set_rng_state_all") else None
