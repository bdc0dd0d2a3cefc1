"""The format of plain data, in which values travel in registered mode: its operations and its limits.

A value is three lists, encoded with msgpack: *operations*, *atoms* and *blobs*. Atoms are None, bools, 64-bit integers,
floats and strings. Blobs are bytes. Operations build the value on a stack. Each is a 32-bit number: a code in the low 5
bits, and a count above. ``(1, [2, "x"])`` is

    ATOMS 3, LIST 2, TUPLE 2        1, 2, "x"

because containers take their elements from the stack. No operation names a class or a function, so decoding runs no
code but that of the types below. Tensors and references travel beside the data, and operations refer to them by their
index among both.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

CODE_BITS: Final = 5
CODE: Final = (1 << CODE_BITS) - 1
MAX_COUNT: Final = (1 << (32 - CODE_BITS)) - 1

# The codes of operations. The numbers are part of the protocol.
ATOMS: Final = 0
"""Push the next `count` atoms."""
TUPLE: Final = 1
LIST: Final = 2
DICT: Final = 3
"""Take `count` keys and values, alternating."""
SET: Final = 4
FROZENSET: Final = 5
SIZE: Final = 6
"""A torch.Size of `count` integers."""
BYTES: Final = 7
"""Push the next `count` blobs."""
BYTEARRAY: Final = 8
"""Push the next blob as a bytearray."""
INTEGER: Final = 9
"""Push the next blob as an integer of more than 64 bits: little-endian, two's complement."""
COMPLEX: Final = 10
SLICE: Final = 11
RANGE: Final = 12
DTYPE: Final = 13
"""Push the dtype with this number (see `telegrad.wire.descriptors`)."""
DEVICE: Final = 14
"""Take a string, and push the device of that name."""
LAYOUT: Final = 15
"""Push the layout with this number."""
TENSOR: Final = 16
"""Push the attachment with this index."""
PARAMETER: Final = 17
REFERENCE: Final = 18

LAYOUT_NAMES: Final = (
    "strided",
    "sparse_coo",
    "sparse_csr",
    "sparse_csc",
    "sparse_bsr",
    "sparse_bsc",
    "jagged",
    "_mkldnn",
)
LAYOUTS: tuple[torch.layout | None, ...] = tuple(getattr(torch, name, None) for name in LAYOUT_NAMES)

MAX_DEPTH: Final = 64
"""How deep containers may be nested. Python hashes and compares nested tuples recursively, without a limit."""
MAX_ELEMENTS: Final = 1 << 22
"""How many atoms, blobs and operations a value may have."""
MAX_COMPOSITE_KEYS: Final = 1024
"""How many keys of one dict or set may be of the kinds whose hashes a sender can choose to be equal. A dict with many
equal hashes takes quadratic time, during which no other thread runs."""

MAX_COMPARED: Final = 1 << 24
"""How many elements of such keys may have to be compared to rebuild a value, over all its dicts and sets: long keys
with equal beginnings take long to compare, and a value may have many dicts."""

COMPOSITE: Final = frozenset({tuple, frozenset, complex, range, torch.Size})
"""Kinds of such keys. Integers of more than 64 bits are the other kind."""
SMALLEST, LARGEST = -(1 << 63), (1 << 64) - 1
"""The range of integers that are atoms. A range must consist of such: Python divides them to find its length, which
takes quadratic time for long integers."""
_SIMPLE: Final = frozenset({str, bytes, float, bool, type(None)})


def composite_count(keys: Sequence[object]) -> int:
    """Return how many keys are of the kinds whose hashes a sender can choose.

    >>> composite_count([1, "x", (1, 2), 1 << 70])
    2
    """
    return len(_composite(keys))


def compared_elements(keys: Sequence[object]) -> int:
    """Return how many elements have to be compared for a dict or set with these keys, if all hashes are equal.

    >>> compared_elements([1, "x", (1, 2)]), compared_elements([(1, 2), (3, 4), (5, 6)])
    (0, 18)
    """
    if len(keys) < 2 or _SIMPLE.issuperset(map(type, keys)):
        return 0
    composite = _composite(keys)
    return (len(composite) - 1) * sum(map(_weight, composite)) if len(composite) > 1 else 0


def _composite(keys: Sequence[object]) -> list[object]:
    return [key for key in keys if type(key) in COMPOSITE or (type(key) is int and not is_atom(key))]


def is_atom(number: int) -> bool:
    """Return whether an integer has at most 64 bits."""
    return SMALLEST <= number <= LARGEST


def _weight(key: object) -> int:
    """Return how long it takes to compare a key with an equal one, in units of an element."""
    if isinstance(key, tuple | frozenset):  # nested at most MAX_DEPTH levels deep
        return 1 + sum(map(_weight, key))
    if isinstance(key, str | bytes):
        return 1 + len(key) // 64
    return 1 + key.bit_length() // 512 if isinstance(key, int) else 1
