"""Stands in for torch.distributed.rpc, .autograd, .optim and .nn: programs written for them run on telegrad unchanged.

>>> import telegrad.drop_in
>>> telegrad.drop_in.install()                                    # doctest: +SKIP
>>> import torch.distributed.rpc as rpc                           # doctest: +SKIP

A program that knows nothing of telegrad is started with ``python -m telegrad.drop_in script.py``. Torch is loaded only
when the program loads it, so this module and `telegrad.drop_in.children` do without.
"""

from __future__ import annotations

__all__ = ["install", "installed"]


def install() -> None:
    """Make torch.distributed.rpc and its kin be telegrad's, in this process and in every one that it starts.

    Modules that took names from them before (``from torch.distributed.rpc import rpc_sync``) keep torch's: call this
    first. Calling it again does nothing.
    """
    from telegrad.drop_in import children, modules

    modules.replace()
    children.inherit()


def installed() -> bool:
    """Whether `install` was called in this process, or in the one that started it."""
    import sys

    modules = sys.modules.get("telegrad.drop_in.modules")
    return modules is not None and modules.replaced()
