"""PyTorch's tests for CUDA on simulated devices: the same source, with "cuda" replaced by "sim".

The tests that measure how telegrad waits for streams prove less here than on CUDA: simulated operators run when they
are called, and `_sleep` does nothing.
"""

from __future__ import annotations

import importlib.util
import linecache
import re
import sys
from pathlib import Path
from types import ModuleType

import torch

from telegrad.testing import accelerator

DEVICES = 4

_NEEDS_GPUS = re.compile(r"^ *@skip_if_lt_x_gpu\(\d\)$", re.MULTILINE)
_CUDA = re.compile(r"\bcuda\b|(?<=\bis_)cuda\b")
_CYCLES = re.compile(r"get_cycles_per_ms\(\)")


def load(name: str) -> ModuleType:
    """Import a module of PyTorch's tests for simulated devices, under another name."""
    changed = f"conformance.simulated_{name.rpartition('.')[2]}"
    if changed in sys.modules:
        return sys.modules[changed]
    _install()
    spec = importlib.util.find_spec(name)
    assert spec is not None, name
    source = Path(str(spec.origin)).read_text(encoding="utf-8")
    source = _CYCLES.sub("0", _CUDA.sub(accelerator.DEVICE_TYPE, _NEEDS_GPUS.sub("", source)))
    module = ModuleType(changed)
    module.__file__ = f"<{changed}>"
    # TorchScript reads the source of functions.
    linecache.cache[module.__file__] = (len(source), None, source.splitlines(keepends=True), module.__file__)
    sys.modules[changed] = module
    exec(compile(source, module.__file__, "exec"), module.__dict__)
    return module


def _install() -> None:
    accelerator.install(DEVICES)
    sim = getattr(torch, accelerator.DEVICE_TYPE)
    sim.stream = lambda stream: stream  # torch's streams are context managers
    sim._sleep = lambda cycles: None
