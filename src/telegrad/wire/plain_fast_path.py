"""Encode and decode the most common plain values without a walk: calls with few atoms or tensors, and single results.

The bytes are those that `plain_encode` makes. For calls with only tensors, single tensors and None they are constant,
and `decode` looks them up in a table.

>>> data, attachments = encode(((torch.ones(2),), {}))
>>> decode(data, attachments)
((tensor([1., 1.]),), {})
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import msgspec
import torch

from telegrad.wire.plain_format import ATOMS, CODE_BITS, DICT, TENSOR, TUPLE

NOT_FOUND = object()
"""Returned by `decode` for bytes that are not in the table."""
ATOM_TYPES = frozenset({type(None), bool, int, float, str})

to_msgpack = msgspec.msgpack.Encoder().encode
_MOST_ARGUMENTS = 8


def pack_program(operations: Sequence[int]) -> bytes:
    """Return operations as bytes."""
    return struct.pack(f"<{len(operations)}I", *operations)


def _operation(code: int, count: int = 0) -> int:
    return count << CODE_BITS | code


def _call(count: int) -> list[int]:
    """Return the operations that make the arguments of a call from `count` values on the stack."""
    return [_operation(TUPLE, count), _operation(DICT), _operation(TUPLE, 2)]


_NONE = to_msgpack((pack_program([_operation(ATOMS, 1)]), [None], []))
_ONE_TENSOR = to_msgpack((pack_program([_operation(TENSOR)]), [], []))
_CALLS = [
    to_msgpack((pack_program([*(_operation(TENSOR, index) for index in range(count)), *_call(count)]), [], []))
    for count in range(_MOST_ARGUMENTS + 1)
]
_COUNTS = {data: count for count, data in enumerate(_CALLS)}
_ATOM = pack_program([_operation(ATOMS, 1)])
_ATOM_CALLS = [pack_program([_operation(ATOMS, count), *_call(count)]) for count in range(_MOST_ARGUMENTS + 1)]
_ATOM_COUNTS = {program: count for count, program in enumerate(_ATOM_CALLS)}
MAX_SIZE = max(map(len, (_NONE, _ONE_TENSOR, *_CALLS)))
"""Longer bytes are never in the table of `decode`."""


def encode(value: Any) -> tuple[bytes, list[Any]] | None:
    """Return the bytes and the tensors in order, or None if the value is not one of the common ones."""
    kind = type(value)
    try:
        if kind in ATOM_TYPES:
            return (_NONE if value is None else to_msgpack((_ATOM, (value,), ()))), []
        if kind is torch.Tensor:
            return None if value.__dict__ else (_ONE_TENSOR, [value])
        if kind is not tuple or len(value) != 2:
            return None
        args, kwargs = value
        if type(args) is not tuple or type(kwargs) is not dict or kwargs or len(args) > _MOST_ARGUMENTS:
            return None
        if args and ATOM_TYPES.issuperset(map(type, args)):
            return to_msgpack((_ATOM_CALLS[len(args)], args, ())), []
    except (OverflowError, UnicodeEncodeError):
        return None
    for arg in args:
        if type(arg) is not torch.Tensor or arg.__dict__:
            return None
    if len(args) > 1 and len(set(map(id, args))) < len(args):
        return None  # a repeated tensor is sent once
    return _CALLS[len(args)], list(args)


def decode(data: bytes, attachments: Sequence[object]) -> object:
    """Return the value, if the bytes are in the table and match the attachments, else NOT_FOUND."""
    count = _COUNTS.get(data)
    if count is not None and count == len(attachments) and all(isinstance(x, torch.Tensor) for x in attachments):
        return tuple(attachments), {}
    return None if data == _NONE else NOT_FOUND


def decode_atoms(program: bytes, atoms: list[Any], blobs: list[bytes]) -> object:
    """Return the arguments of a call that has nothing but atoms, else NOT_FOUND."""
    count = _ATOM_COUNTS.get(program)
    return (tuple(atoms), {}) if count is not None and count == len(atoms) and not blobs else NOT_FOUND
