"""A function and arguments for calls on several workers, encoded once for all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

import torch

from telegrad.wire import function_names
from telegrad.wire.encoded import Encoded

ROOT = ("args", "kwargs")
"""What the parts of an encoded request are called in errors."""


@final
class SharedCall:
    """Stands for the function of a call, which then has no arguments of its own. For one thread."""

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> None:
        self._function = function
        self._values = (args, kwargs or {})
        self._encoded: dict[tuple[bool, bool], tuple[str, Encoded]] = {}

    def encode(self, encode: Callable[..., Encoded], *, by_name: bool, edges: bool) -> tuple[str, Encoded]:
        """Return the name of the function, empty if it is among the values, and the encoded values.

        `by_name` says whether the callee runs the same program; `edges` is that of `telegrad.wire.payload.encode`.
        """
        found = self._encoded.get((by_name, edges))
        if found is None:
            name = function_names.function_name(self._function, main_by_name=by_name) or ""
            values, root = (self._values, ROOT) if name else ((self._function, *self._values), ("function", *ROOT))
            found = name, encode(values, root=root, main_by_name=by_name, edges=edges)
            self._encoded[by_name, edges] = found
        return found


def size_of(encoded: Encoded) -> int:
    """Return about how many bytes a message with this value has."""
    return len(encoded.data) + sum(
        part.numel() * part.element_size() if isinstance(part, torch.Tensor) else part.raw().nbytes
        for part in encoded.attachments
    )
