"""What is not in a RemoteModule, because it is in the module on the worker: errors that say so."""

from __future__ import annotations

from typing import Any, NoReturn

from telegrad.errors import TelegradError


class Elsewhere(dict[str, Any]):
    """Stands for the parameters, buffers or submodules of a RemoteModule here: it is empty, and stays so.

    Code that changes a module through torch's private dicts (`torch.nn.utils.weight_norm`, pruning) is told.
    """

    def __init__(self, owner: str) -> None:
        super().__init__()
        self._owner = owner

    def __missing__(self, name: str) -> NoReturn:
        raise TelegradError(
            f"{name!r} of {self._owner} is on the worker, and cannot be got at or changed here: run what changes it "
            "there, with apply()"
        )

    def __setitem__(self, name: str, value: object) -> NoReturn:
        self.__missing__(name)

    def __delitem__(self, name: str) -> NoReturn:
        self.__missing__(name)

    def __deepcopy__(self, memo: object) -> Elsewhere:
        return Elsewhere(self._owner)


def refuse(name: str) -> NoReturn:
    """Raise what a method raises that would act on the module here."""
    raise ValueError(
        f"Method ``{name}`` not supported for RemoteModule: it would act on the module here, and not on the one on the "
        "worker. Do it in the class that the worker builds, or with apply(), which runs a function on the module there"
    )
