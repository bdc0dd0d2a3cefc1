"""Errors for code that uses an `RRef` as if it were its value: ``rref[0]``, ``for x in rref``, ``rref + 1``."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

from telegrad.wire.reference import Reference


def _refused(method: str, lacks: str) -> Callable[..., NoReturn]:
    def refuse(self: NotAValue, *args: object) -> NoReturn:
        here = "local_value() is the value itself" if self.is_owner() else "to_here() is a copy of it"
        raise TypeError(
            f"{self!r} is a reference, which {lacks}: rref.rpc_sync().{method}(...) calls the method of its value on "
            f"the owner, and rref.{here}"
        )

    refuse.__name__ = method
    return refuse


def _no_operand(method: str, sign: str) -> Callable[..., NoReturn]:
    return _refused(method, f"is no operand of {sign}")


class NotAValue(Reference):
    """Base class of `RRef` with the operators of containers and numbers, which all raise and say what to write.

    Equality, hashing and truth are those of any object, because programs keep references in sets and dicts and test
    whether they have one. There is no ``__iter__``, ``__contains__`` or ``__len__``: programs that flatten nested
    arguments look for them. Python iterates with ``__getitem__`` then, which raises.
    """

    __slots__ = ()

    def is_owner(self) -> bool:
        """Return whether this worker owns the value."""
        raise NotImplementedError

    __getitem__ = _refused("__getitem__", "has no items")
    __setitem__ = _refused("__setitem__", "has no items")
    __delitem__ = _refused("__delitem__", "has no items")
    __add__ = _no_operand("__add__", "+")
    __radd__ = _no_operand("__radd__", "+")
    __sub__ = _no_operand("__sub__", "-")
    __rsub__ = _no_operand("__rsub__", "-")
    __mul__ = _no_operand("__mul__", "*")
    __rmul__ = _no_operand("__rmul__", "*")
    __truediv__ = _no_operand("__truediv__", "/")
    __rtruediv__ = _no_operand("__rtruediv__", "/")
    __matmul__ = _no_operand("__matmul__", "@")
    __rmatmul__ = _no_operand("__rmatmul__", "@")
    __neg__ = _no_operand("__neg__", "-")
    __lt__ = _no_operand("__lt__", "<")
    __le__ = _no_operand("__le__", "<=")
    __gt__ = _no_operand("__gt__", ">")
    __ge__ = _no_operand("__ge__", ">=")
    __float__ = _refused("__float__", "is no number")
    __int__ = _refused("__int__", "is no number")
