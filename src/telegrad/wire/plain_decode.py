"""Decode plain data (see `plain_format`). The bytes are untrusted: they may come from a party that wants to do harm.

Decoding creates values of the listed types only, and calls nothing that the sender chooses. It uses no recursion, and
memory in proportion to the length of the data.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import torch

from telegrad.errors import PayloadError, ProtocolError
from telegrad.interrupts import interruptible
from telegrad.wire import plain_fast_path
from telegrad.wire.descriptors import DTYPE_NAMES, DTYPES
from telegrad.wire.plain_format import (
    ATOMS,
    BYTEARRAY,
    BYTES,
    CODE,
    CODE_BITS,
    COMPLEX,
    DEVICE,
    DICT,
    DTYPE,
    FROZENSET,
    INTEGER,
    LAYOUT,
    LAYOUT_NAMES,
    LAYOUTS,
    LIST,
    MAX_COMPARED,
    MAX_COMPOSITE_KEYS,
    MAX_DEPTH,
    MAX_ELEMENTS,
    PARAMETER,
    RANGE,
    REFERENCE,
    SET,
    SIZE,
    SLICE,
    TENSOR,
    TUPLE,
    compared_elements,
    composite_count,
    is_atom,
)
from telegrad.wire.reference import Reference
from telegrad.wire.torch_state import default_torch_state

_Parts = tuple[bytes, list[bool | int | float | str | None], list[bytes]]
_from_msgpack = msgspec.msgpack.Decoder(_Parts).decode
_DEVICE_NAME = 32  # characters


@interruptible
def decode(
    data: bytes | memoryview, attachments: Sequence[object], references: Sequence[tuple[int, object]] = ()
) -> object:
    """Return the value. Raise ProtocolError for bytes that no encoder of plain data makes."""
    if references:
        attachments = list(attachments)
        for position, reference in references:
            attachments.insert(min(position, len(attachments)), reference)
    if len(data) <= plain_fast_path.MAX_SIZE:
        value = plain_fast_path.decode(bytes(data), attachments)
        if value is not plain_fast_path.NOT_FOUND:
            return value
    try:
        program, atoms, blobs = _from_msgpack(data)
        value = plain_fast_path.decode_atoms(program, atoms, blobs)
        if value is not plain_fast_path.NOT_FOUND:
            return value
        operations = struct.unpack(f"<{len(program) // 4}I", program)
        if len(operations) + len(atoms) + len(blobs) > 2 * MAX_ELEMENTS:
            raise ProtocolError(f"it has more than {2 * MAX_ELEMENTS:,} elements")
        return _Reader(atoms, blobs, attachments).run(operations)
    except PayloadError:
        raise
    except (ValueError, TypeError, IndexError, OverflowError, RuntimeError, struct.error) as error:
        # A ProtocolError is a RuntimeError; msgspec's errors and UnicodeDecodeError are ValueErrors.
        raise ProtocolError(f"a received value is not plain data: {error}") from error


class _Reader:
    """Builds one value on a stack."""

    __slots__ = ("_atom", "_atoms", "_attachments", "_blob", "_blobs", "_compared", "_depths", "_stack", "_starts")

    def __init__(self, atoms: list[Any], blobs: list[bytes], attachments: Sequence[object]) -> None:
        self._atoms, self._blobs, self._attachments = atoms, blobs, attachments
        self._atom = self._blob = 0  # how many have been used
        self._compared = 0  # elements of keys
        self._stack: list[Any] = []
        # The containers on the stack that hold containers: where they are, and how deep they are.
        self._starts: list[int] = []
        self._depths: list[int] = []

    def run(self, operations: Sequence[int]) -> object:
        stack = self._stack
        for operation in operations:
            code, count = operation & CODE, operation >> CODE_BITS
            if code == ATOMS:
                start, self._atom = self._atom, self._atom + count
                stack += self._atoms[start : self._atom]
            elif code == BYTES:
                start, self._blob = self._blob, self._blob + count
                stack += self._blobs[start : self._blob]
            elif code in _CONTAINERS:
                items = self._take(2 * count if code == DICT else count, container=True)
                if code in _WITH_KEYS:
                    self._check_keys(items[::2] if code == DICT else items)
                stack.append(_CONTAINERS[code](items))
            elif code in _FROM_ELEMENTS:
                length, make = _FROM_ELEMENTS[code]
                stack.append(make(self._take(length, container=code == SLICE)))
            elif code in (BYTEARRAY, INTEGER):
                blob = self._blobs[self._blob]
                self._blob += 1
                stack.append(bytearray(blob) if code == BYTEARRAY else int.from_bytes(blob, "little", signed=True))
            elif code in (TENSOR, PARAMETER, REFERENCE):
                stack.append(self._attachment(code, count))
            else:
                stack.append(_constant(code, count))
        if len(stack) != 1 or self._atom != len(self._atoms) or self._blob != len(self._blobs):
            raise ProtocolError(
                f"it has {len(stack)} values, {self._atom} of {len(self._atoms)} atoms and {self._blob} of "
                f"{len(self._blobs)} blobs"
            )
        return stack[0]

    def _take(self, count: int, *, container: bool) -> list[Any]:
        """Take the last values from the stack."""
        start = len(self._stack) - count
        if start < 0:
            raise ProtocolError(f"it takes {count} values from a stack of {len(self._stack)}")
        items = self._stack[start:]
        del self._stack[start:]
        if not container:
            return items
        depth = 0
        while self._starts and self._starts[-1] >= start:
            self._starts.pop()
            depth = max(depth, self._depths.pop())
        if not depth and not _CONTAINER_TYPES.isdisjoint(map(type, items)):
            depth = 1
        if depth:
            if depth >= MAX_DEPTH:
                raise ProtocolError(f"it is nested deeper than {MAX_DEPTH} levels")
            self._starts.append(start)
            self._depths.append(depth + 1)
        return items

    def _check_keys(self, keys: list[Any]) -> None:
        if len(keys) > MAX_COMPOSITE_KEYS and composite_count(keys) > MAX_COMPOSITE_KEYS:
            raise ProtocolError(f"it has a dict or set with more than {MAX_COMPOSITE_KEYS} composite keys")
        self._compared += compared_elements(keys)
        if self._compared > MAX_COMPARED:
            raise ProtocolError("its dicts and sets have too many long composite keys")

    def _attachment(self, code: int, index: int) -> object:
        found = self._attachments[index]
        if not isinstance(found, Reference if code == REFERENCE else torch.Tensor):
            raise ProtocolError(f"attachment {index} is a {type(found).__name__}")
        if code == PARAMETER and isinstance(found, torch.Tensor) and found.grad_fn is None:
            # With an edge to its sender the tensor cannot be a Parameter, which must be a leaf.
            with default_torch_state():
                return torch.nn.Parameter(found, found.requires_grad)
        return found


def _make_dict(items: list[Any]) -> dict[Any, Any]:
    return dict(zip(items[::2], items[1::2], strict=True))


def _make_size(items: list[Any]) -> torch.Size:
    if not {int}.issuperset(map(type, items)):
        raise ProtocolError("it has a torch.Size of other values than integers")
    return torch.Size(items)


def _make_complex(items: list[Any]) -> complex:
    if not {float}.issuperset(map(type, items)):
        raise ProtocolError("it has a complex number of other values than floats")
    return complex(*items)


def _make_range(items: list[Any]) -> range:
    if not {int}.issuperset(map(type, items)) or not all(map(is_atom, items)):
        raise ProtocolError("it has a range of other values than integers of at most 64 bits")
    return range(*items)


def _make_device(items: list[Any]) -> torch.device:
    (name,) = items
    if type(name) is not str or len(name) > _DEVICE_NAME:
        raise ProtocolError("it has a device without a name")
    return torch.device(name)


def _constant(code: int, number: int) -> object:
    if code == DTYPE:
        names: tuple[str, ...] = DTYPE_NAMES
        table: Sequence[object] = DTYPES
    elif code == LAYOUT:
        names, table = LAYOUT_NAMES, LAYOUTS
    else:
        raise ProtocolError(f"it has the unknown operation {code}")
    found = table[number]
    if found is None:
        raise PayloadError(f"received torch.{names[number]}, but torch {torch.__version__} has no such object")
    return found


_CONTAINERS: dict[int, Callable[[list[Any]], object]] = {
    TUPLE: tuple,
    LIST: lambda items: items,
    DICT: _make_dict,
    SET: set,
    FROZENSET: frozenset,
    SIZE: _make_size,
}
_WITH_KEYS = frozenset({DICT, SET, FROZENSET})
_CONTAINER_TYPES = frozenset({tuple, list, dict, set, frozenset, slice})
_FROM_ELEMENTS: dict[int, tuple[int, Callable[[list[Any]], object]]] = {
    COMPLEX: (2, _make_complex),
    SLICE: (3, lambda items: slice(*items)),
    RANGE: (3, _make_range),
    DEVICE: (1, _make_device),
}
