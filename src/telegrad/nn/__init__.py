"""Modules on other workers, and models split across workers."""

from telegrad.nn.parameters import gradients, named_parameter_rrefs, parameter_rrefs, remote_modules
from telegrad.nn.remote_module import RemoteModule
from telegrad.nn.splitting import split

__all__ = ["RemoteModule", "gradients", "named_parameter_rrefs", "parameter_rrefs", "remote_modules", "split"]


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
