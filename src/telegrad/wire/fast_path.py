"""Encode the most common values without a pickler: calls with a few numbers and tensors, and single results.

The bytes are the same as pickle's, so any receiver can decode them. But creating a pickler and its dispatch table takes
several microseconds, and these values need neither. For the simplest ones (no arguments, only tensors, None) the bytes
are constant, and `decode` looks them up in a table.

>>> data, attachments = encode(((torch.ones(2), 3), {}))
>>> pickle.loads(data, buffers=attachments)
((tensor([1., 1.]), 3), {})
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import torch

NOT_FOUND = object()
"""Returned by `decode` for bytes that are not in the table."""

_PROTOCOL = 5
_MAX_TENSORS = 8  # in a call whose bytes are in the table
# Types that pickle handles itself, whatever reducers are registered. No subclasses: they may have extra state.
_ATOMS = frozenset({type(None), bool, int, float, complex, str, bytes})
# Marks the next tensor. It must be writable, or pickle would replace the tensor with a read-only memoryview.
_MARKER = pickle.PickleBuffer(bytearray(1))


def _out_of_band(buffer: pickle.PickleBuffer) -> None:
    """Return a false value: pickle then leaves the buffer out of the bytes."""


def _dumps(value: object) -> bytes:
    return pickle.dumps(value, _PROTOCOL, buffer_callback=_out_of_band)


_NONE = _dumps(None)
_TENSOR = _dumps(_MARKER)
_CALLS = [_dumps(((_MARKER,) * count, {})) for count in range(_MAX_TENSORS + 1)]
_NO_ARGUMENTS = _CALLS[0]
_COUNTS = {data: count for count, data in enumerate(_CALLS)}
MAX_SIZE = max(map(len, (_NONE, _TENSOR, *_CALLS)))
"""Longer bytes are never in the table of `decode`."""


def encode(value: Any) -> tuple[bytes, list[Any]] | None:
    """Return the pickled bytes and the tensors in order, or None if the value is not one of the common ones."""
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
    if not args:
        return _NO_ARGUMENTS, []
    tensors = []
    for arg in args:
        kind = type(arg)
        if kind is torch.Tensor:
            if arg.__dict__:
                return None
            tensors.append(arg)
        elif kind not in _ATOMS:
            return None
    count = len(tensors)
    if count > 1 and len(set(map(id, tensors))) < count:
        return None  # a repeated tensor must be received as one object
    if count <= _MAX_TENSORS and count == len(args):
        return _CALLS[count], tensors
    if not tensors:
        return pickle.dumps(value, _PROTOCOL), tensors
    return _dumps((tuple([_MARKER if type(arg) is torch.Tensor else arg for arg in args]), kwargs)), tensors


def decode(data: bytes, attachments: Sequence[object]) -> object:
    """Return the value, if the bytes are in the table and match the number of attachments, else NOT_FOUND."""
    count = _COUNTS.get(data)
    if count is not None:
        return (tuple(attachments), {}) if count == len(attachments) else NOT_FOUND
    if data == _NONE:
        return None
    if data == _TENSOR and len(attachments) == 1:
        return attachments[0]
    return NOT_FOUND
