"""Replaces modules of torch by telegrad's.

Torch itself imports torch.distributed.rpc while it loads, so its modules already exist, and other modules of torch hold
names from them. They are removed from ``sys.modules`` and replaced by ours, and the few modules of torch that hold one
of their classes get ours. Two packages, torch.distributed.optim and .nn, take a second to load and are rarely imported.
Each has one module that is replaced. An import finder provides it when the package loads.
"""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from telegrad.drop_in.data_parallel import track_parameters

_HERE = "telegrad.drop_in"

REPLACED = {
    "torch._C._distributed_autograd": f"{_HERE}.native.autograd",
    "torch._C._distributed_rpc": f"{_HERE}.native.rpc",
    "torch._C._distributed_rpc_testing": f"{_HERE}.rpc.faulty_agent",
    "torch.distributed.autograd": f"{_HERE}.autograd",
    "torch.distributed.rpc": f"{_HERE}.rpc",
    "torch.distributed.rpc._utils": f"{_HERE}.rpc._utils",
    "torch.distributed.rpc.api": f"{_HERE}.rpc.api",
    "torch.distributed.rpc.backend_registry": f"{_HERE}.rpc.backend_registry",
    "torch.distributed.rpc.constants": f"{_HERE}.rpc.constants",
    "torch.distributed.rpc.functions": f"{_HERE}.rpc.functions",
    "torch.distributed.rpc.internal": f"{_HERE}.rpc.internal",
    "torch.distributed.rpc.options": f"{_HERE}.rpc.options",
    "torch.distributed.rpc.rref_proxy": f"{_HERE}.rpc.rref_proxy",
    "torch.distributed.rpc.server_process_global_profiler": f"{_HERE}.rpc.server_process_global_profiler",
}
"""Torch's module name: the module that replaces it."""

REPLACED_ON_LOAD = {
    "torch.distributed.optim.optimizer": (f"{_HERE}.optim.optimizer", "DistributedOptimizer"),
    "torch.distributed.nn.api.remote_module": (f"{_HERE}.nn.remote_module", "RemoteModule"),
}
"""The same for modules replaced when their packages load, with the name that the package imports from the module."""

REPLACED_ON_IMPORT = {
    "torch.distributed.rpc._testing": f"{_HERE}.rpc._testing",
    "torch.distributed.rpc._testing.faulty_agent_backend_registry": (
        f"{_HERE}.rpc._testing.faulty_agent_backend_registry"
    ),
}
"""The same for modules loaded only when the program imports them, because they register a backend."""

_lock = threading.Lock()  # protects _replaced
_replaced = False


def replaced() -> bool:
    """Return whether torch's modules have been replaced in this process."""
    return _replaced


def replace() -> None:
    """Replace torch's modules by telegrad's."""
    global _replaced
    with _lock:
        if _replaced:
            return
        for name in [name for name in sys.modules if name.startswith("torch.distributed.rpc")]:
            del sys.modules[name]
        for name, ours in REPLACED.items():
            _put(name, importlib.import_module(ours))
        sys.meta_path.insert(0, _Finder())
        _update_torch()
        for name, (ours, imported) in REPLACED_ON_LOAD.items():
            package = ".".join(name.split(".")[:3])
            if package in sys.modules or not _has_rpc():
                _put(name, importlib.import_module(ours))
                setattr(importlib.import_module(package), imported, getattr(sys.modules[name], imported))
        _replaced = True


def _put(name: str, module: ModuleType) -> None:
    sys.modules[name] = module
    parent, _, attribute = name.rpartition(".")
    if parent in sys.modules:
        setattr(sys.modules[parent], attribute, module)


def _has_rpc() -> bool:
    """Return whether torch was built with RPC. If not, its packages do not import the modules that need RPC."""
    import torch

    return hasattr(torch._C, "_rpc_init")


class _Finder(MetaPathFinder):
    """Finds telegrad's modules for those that load later than torch."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        ours = REPLACED_ON_LOAD[fullname][0] if fullname in REPLACED_ON_LOAD else REPLACED_ON_IMPORT.get(fullname)
        return ModuleSpec(fullname, _ReplacementLoader(ours)) if ours is not None else None


class _ReplacementLoader(Loader):
    """Loads a module of telegrad under the name of one of torch's."""

    def __init__(self, ours: str) -> None:
        self._ours = ours

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(self._ours)
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec  # the import system has put torch's name there


def _update_torch() -> None:
    """Replace the names from torch.distributed.rpc that other modules of torch hold."""
    rpc = importlib.import_module(f"{_HERE}.rpc")
    jit: Any = importlib.import_module("torch._jit_internal")
    jit.RRef, jit.PyRRef = rpc.RRef, rpc.PyRRef
    annotations: Any = importlib.import_module("torch.jit.annotations")
    annotations.RRef = rpc.RRef
    if not hasattr(annotations, "is_rref"):  # torch was built without RPC, but will now ask
        annotations.is_rref = lambda annotation: False
    data_parallel: Any = importlib.import_module("torch.nn.parallel.distributed")
    data_parallel.RRef, data_parallel.RPC_AVAILABLE = rpc.RRef, True
    track_parameters(data_parallel.DistributedDataParallel)
    autograd = importlib.import_module(f"{_HERE}.autograd")
    importlib.import_module(f"{_HERE}.autograd.scripting").register(autograd.get_gradients, autograd.backward)
    futures: Any = importlib.import_module("torch.futures")
    ours: Any = importlib.import_module(f"{_HERE}.rpc.futures")
    futures.collect_all, futures.wait_all = ours.collect_all, ours.wait_all
