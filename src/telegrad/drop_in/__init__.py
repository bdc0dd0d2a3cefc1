"""Replaces torch.distributed.rpc, .autograd, .optim and .nn, so that programs written for them run on telegrad.

>>> import telegrad.drop_in
>>> telegrad.drop_in.install()                                    # doctest: +SKIP
>>> import torch.distributed.rpc as rpc                           # doctest: +SKIP

To run an unmodified program, start it with ``python -m telegrad.drop_in script.py``. Torch is loaded only when the
program imports it, so this module and `telegrad.drop_in.subprocesses` do not import torch.
"""

from __future__ import annotations

__all__ = ["install", "installed"]


def install() -> None:
    """Replace torch.distributed.rpc and related modules, in this process and in every one that it starts.

    Call this first: modules that imported names from them earlier (``from torch.distributed.rpc import rpc_sync``) keep
    torch's. Calling it again does nothing.
    """
    from telegrad.drop_in import modules, subprocesses

    modules.replace()
    subprocesses.install_in_subprocesses()


def installed() -> bool:
    """Return whether `install` was called in this process, or in the one that started it."""
    import sys

    modules = sys.modules.get("telegrad.drop_in.modules")
    return modules is not None and modules.replaced()
