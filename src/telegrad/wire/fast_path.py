"""The commonest values, without a pickler: calls with a few numbers and tensors, and results that are one, or none.

What is written is pickle all the same, and means the same, so a reader needs to know nothing of this. But making
a pickler and its table takes several microseconds, and these values need neither. Of the simplest (no arguments, only
tensors, None) even the bytes are always the same, and the reader knows them by heart.

>>> data, attachments = encode(((torch.ones(2), 3), {}))
>>> pickle.loads(data, buffers=attachments)
((tensor([1., 1.]), 3), {})
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import torch

NOTHING = object()
"""Stands for "not one of those"."""

_PROTOCOL = 5
_MOST = 8  # tensors in a call whose bytes are known by heart
# Types that pickle writes whole, whatever the program registered. No subclasses: those may have a state of their own.
_ATOMS = frozenset({type(None), bool, int, float, complex, str, bytes})
# Stands for the next tensor. It must be writable, or pickle would wrap what it finds there in a read-only memoryview.
_MARKER = pickle.PickleBuffer(bytearray(1))


def _aside(buffer: pickle.PickleBuffer) -> None:
    """Tell pickle that the buffer travels beside the bytes."""


def _dumps(value: object) -> bytes:
    return pickle.dumps(value, _PROTOCOL, buffer_callback=_aside)


_NONE = _dumps(None)
_TENSOR = _dumps(_MARKER)
_CALLS = [_dumps(((_MARKER,) * count, {})) for count in range(_MOST + 1)]
_COUNTS = {data: count for count, data in enumerate(_CALLS)}
LONGEST = max(map(len, (_NONE, _TENSOR, *_CALLS)))
"""What is longer than this is nothing that `decode` knows."""


def encode(value: Any) -> tuple[bytes, list[Any]] | None:
    """The value as bytes, and its tensors in their order; None if it is not one of those values."""
    kind = type(value)
    if kind is not tuple:
        if kind in _ATOMS:
            return (_NONE if value is None else pickle.dumps(value, _PROTOCOL)), []
        if kind is torch.Tensor and not value.__dict__:
            return _TENSOR, [value]
        return None
    if len(value) != 2:
        return None
    args, kwargs = value
    if type(args) is not tuple or type(kwargs) is not dict or kwargs:
        return None
    tensors = []
    for arg in args:
        kind = type(arg)
        if kind is torch.Tensor:
            if arg.__dict__:
                return None
            tensors.append(arg)
        elif kind not in _ATOMS:
            return None
    if len(tensors) > 1 and len(set(map(id, tensors))) < len(tensors):
        return None  # one tensor twice must arrive as one
    if len(tensors) == len(args) <= _MOST:
        return _CALLS[len(args)], tensors
    if not tensors:
        return pickle.dumps(value, _PROTOCOL), tensors
    return _dumps((tuple([_MARKER if type(arg) is torch.Tensor else arg for arg in args]), kwargs)), tensors


def decode(data: bytes, attachments: Sequence[object]) -> object:
    """The value, if these bytes are known by heart and the attachments fit; else NOTHING."""
    count = _COUNTS.get(data)
    if count is not None:
        return (tuple(attachments), {}) if count == len(attachments) else NOTHING
    if data == _NONE:
        return None
    if data == _TENSOR and len(attachments) == 1:
        return attachments[0]
    return NOTHING
