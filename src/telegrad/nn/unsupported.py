"""Errors for code that would change a RemoteModule locally, where the module on the worker would not see it."""

from __future__ import annotations

from typing import Any, NoReturn

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


def raise_unsupported(name: str) -> NoReturn:
    """Raise the error for a method that would change the module only locally."""
    raise ValueError(
        f"Method ``{name}`` not supported for RemoteModule: it would change the local handle, not the module on the "
        "worker. Do it in the class that the worker builds, or use apply() to run a function on the module there"
    )
