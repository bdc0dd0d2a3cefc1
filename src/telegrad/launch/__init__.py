"""Starts the workers of a group, from Python. From a shell, use `telegrad run`.

`workers` makes a prompt or a notebook a member of a group with workers that are started for it. `local` runs a function
on a new group and returns the results, and `start` does not wait for it. All three use this machine. Every other engine
has a `start` with the same interface (`telegrad.launch.base`): `ray`, `slurm`, `mpi`, `torchrun` and `ssh`. They are
loaded when they are used.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

from telegrad.launch.base import Group, GroupTimeout, WorkerFailed
from telegrad.launch.local import local, start

if TYPE_CHECKING:
    from telegrad.launch.interactive import workers

__all__ = ["Group", "GroupTimeout", "WorkerFailed", "local", "start", "workers"]

_ENGINES = ("mpi", "ray", "slurm", "ssh", "torchrun")


def __getattr__(name: str) -> Any:
    if name == "workers":  # it needs torch, which a launcher does not
        return importlib.import_module("telegrad.launch.interactive").workers
    if name in _ENGINES:
        return importlib.import_module(f"telegrad.launch.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name, obj=sys.modules[__name__])


def __dir__() -> list[str]:
    return sorted({*__all__, *_ENGINES, *(name for name in globals() if name.startswith("__"))})
