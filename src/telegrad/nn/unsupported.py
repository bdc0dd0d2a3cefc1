"""Errors for code that would change a RemoteModule locally, where the module on the worker would not see it."""

from __future__ import annotations

import sys
import warnings
from types import FrameType
from typing import Any, NoReturn

import torch

from telegrad.errors import TelegradError


class RemoteOnlyDict(dict[str, Any]):
    """Replaces a RemoteModule's local dict of parameters, buffers or submodules: always empty.

    Code that changes a module through torch's private dicts (`torch.nn.utils.weight_norm`, pruning) gets an error.
    """

    def __init__(self, owner: str) -> None:
        super().__init__()
        self._owner = owner

    def __missing__(self, name: str) -> NoReturn:
        raise TelegradError(
            f"{name!r} of {self._owner} is on the worker and cannot be accessed or changed here. Change it there with "
            "apply()"
        )

    def __setitem__(self, name: str, value: object) -> NoReturn:
        self.__missing__(name)

    def __delitem__(self, name: str) -> NoReturn:
        self.__missing__(name)

    def __deepcopy__(self, memo: object) -> RemoteOnlyDict:
        return RemoteOnlyDict(self._owner)


class NoParameters(RemoteOnlyDict):
    """Replaces the parameters of a RemoteModule, and warns whoever lists those of a model that contains it.

    ``model.parameters()`` cannot contain what is on another worker. An optimizer, a norm or a count that is made from
    it would be wrong without a word.
    """

    def items(self) -> Any:
        """Return nothing, after a warning if this is for a list of the parameters of a whole model."""
        depth = _asking_frame()
        if depth is not None:
            warnings.warn(
                f"the parameters of this model that are listed here do not include those of {self._owner}: an "
                "optimizer, clip_grad_norm_() or a count misses them. telegrad.nn.parameter_rrefs(model) lists all of "
                "them, for telegrad.optim.DistributedOptimizer and telegrad.optim.clip_grad_norm_",
                stacklevel=depth,
            )
        return super().items()

    def __deepcopy__(self, memo: object) -> NoParameters:
        return NoParameters(self._owner)


_MODULE = torch.nn.Module.__module__
_NOT_ASKING = ("telegrad.", "torch._", "torch.fx.", "torch.compiler.", "torch.export.", "torch.nn.utils.stateless")
"""Modules that list parameters for themselves, such as the compiler."""


def _asking_frame() -> int | None:
    """Return the stack level of who called ``parameters()`` of a model for the user, as seen from the caller."""
    frame, depth, listed = sys._getframe(2), 2, False
    while frame.f_back is not None and frame.f_globals.get("__name__") == _MODULE:
        name = frame.f_code.co_name
        if name == "zero_grad":  # gradients of passes are in contexts
            return None
        listed = listed or name in ("parameters", "named_parameters")
        frame, depth = frame.f_back, depth + 1
    if not listed or _name(frame).startswith(_NOT_ASKING):
        return None
    while frame.f_back is not None and _name(frame).startswith("torch."):  # an optimizer, clip_grad_norm_
        frame, depth = frame.f_back, depth + 1
    return depth


def _name(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__"))


def raise_unsupported(name: str) -> NoReturn:
    """Raise the error for a method that would change the module only locally."""
    raise ValueError(
        f"Method ``{name}`` not supported for RemoteModule: it would change the local handle, not the module on the "
        "worker. Do it in the class that the worker builds, or use apply() to run a function on the module there"
    )
