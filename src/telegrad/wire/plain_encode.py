"""Encode plain data: the values that travel in registered mode (see `plain_format`).

Only values of exactly these types are plain: None, bool, int, float, complex, str, bytes, bytearray, tuple, list, dict,
set, frozenset, slice, range, torch's Size, dtype, device, layout, Tensor and Parameter, and RRef. A subclass may have
state or behaviour that the receiver cannot have, so it is refused.

>>> from telegrad.wire.plain_decode import decode
>>> encoded = encode({"x": torch.ones(2), "shape": (1, 2)})
>>> decode(encoded.data, encoded.attachments)
{'x': tensor([1., 1.]), 'shape': (1, 2)}
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable
from typing import Any

import torch

from telegrad.errors import PayloadError
from telegrad.interrupts import interruptible
from telegrad.wire import plain_fast_path
from telegrad.wire.descriptors import CODES
from telegrad.wire.encoded import Attachment, Encoded
from telegrad.wire.plain_fast_path import ATOM_TYPES, pack_program, to_msgpack
from telegrad.wire.plain_format import (
    ATOMS,
    BYTEARRAY,
    BYTES,
    CODE_BITS,
    COMPLEX,
    DEVICE,
    DICT,
    DTYPE,
    FROZENSET,
    INTEGER,
    LARGEST,
    LAYOUT,
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
    SMALLEST,
    TENSOR,
    TUPLE,
    compared_elements,
    composite_count,
    is_atom,
)
from telegrad.wire.reference import Reference

PLAIN_TYPES = (
    "None, bool, int, float, complex, str, bytes, bytearray, tuple, list, dict, set, frozenset, slice, range, tensors, "
    "torch's Size, dtype, device and layout, and RRefs"
)
SENT_AS_INT = "_telegrad_sent_as_int"
"""A class attribute: instances of this subclass of int are sent as ints."""


@interruptible
def encode(
    value: object, *, root: str | tuple[str, ...] = "value", main_by_name: bool = True, edges: bool = True
) -> Encoded:
    """Encode a value. Tensors and RRefs become attachments and references.

    ``root`` is the name of the value in errors: "result", or one name per element of a tuple, as ("args", "kwargs").
    The other arguments are those of `payload.encode`, and have no effect: plain data names no classes, and every tensor
    keeps its autograd edge. Raise PayloadError, which names the part that is not plain, as in ``kwargs['model']``.
    """
    fast = plain_fast_path.encode(value)
    if fast is not None:
        return Encoded(*fast)
    try:
        try:
            return _encode(value, careful=False)
        except (OverflowError, UnicodeEncodeError):
            return _encode(value, careful=True)  # finds the large integers, and the text that is not UTF-8
    except _RefusedError as refused:
        raise PayloadError(f"{refused.path(root)} cannot be sent in registered mode: {refused.reason}") from None
    except RecursionError as error:
        raise PayloadError(f"a value cannot be sent: {error}. Call from a less deeply nested function") from error


@interruptible
def _encode(value: object, *, careful: bool) -> Encoded:
    writer = _Writer(careful)
    writer.write(value, 0)
    writer.end_run()
    writer.check_size()
    data = to_msgpack((pack_program(writer.operations), writer.atoms, writer.blobs))
    return Encoded(data, writer.attachments, frozenset(), tuple(writer.references))


class _RefusedError(Exception):
    """A part is not plain. Containers add their steps while it passes through them."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        self.steps: list[int | str] = []

    def path(self, root: str | tuple[str, ...]) -> str:
        steps = list(reversed(self.steps))
        first = steps[0] if steps else None
        if isinstance(root, str):
            name = root
        elif isinstance(first, int):
            name = root[first]
            del steps[0]
        else:
            name = " or ".join(root)
        return name + "".join(f"[{step}]" for step in steps)


class _Writer:
    """The operations, atoms, blobs, attachments and references of one value."""

    __slots__ = (
        "_careful",
        "_compared",
        "_indices",
        "_run",
        "atoms",
        "attachments",
        "blobs",
        "operations",
        "references",
    )

    def __init__(self, careful: bool) -> None:
        self.operations: list[int] = []
        self.atoms: list[Any] = []
        self.blobs: list[bytes | bytearray] = []
        self.attachments: list[Attachment] = []
        self.references: list[tuple[int, Reference]] = []
        self._careful = careful  # check every atom, because msgpack has refused one of them
        self._compared = 0  # elements of keys
        self._run = 0  # atoms since the last operation
        self._indices: dict[int, int] = {}  # by id of a tensor, which the value keeps alive

    def write(self, value: Any, depth: int) -> None:
        kind = type(value)
        if kind in ATOM_TYPES:
            if self._careful:
                self._check_atom(value)
            else:
                self.atoms.append(value)
                self._run += 1
            return
        write = _WRITERS.get(kind)
        if write is None:
            write = _writer_of(kind)
        if depth >= MAX_DEPTH:
            raise _RefusedError(f"it is nested deeper than {MAX_DEPTH} levels, or contains itself")
        self.check_size()
        write(self, value, depth + 1)

    def check_size(self) -> None:
        if len(self.atoms) + len(self.operations) + len(self.blobs) > MAX_ELEMENTS:
            raise _RefusedError(f"the value has more than {MAX_ELEMENTS:,} elements. Send many numbers as a tensor")

    def add(self, code: int, count: int = 0) -> None:
        if self._run:
            self.end_run()
        self.operations.append(count << CODE_BITS | code)

    def end_run(self) -> None:
        if self._run:
            self.operations.append(self._run << CODE_BITS | ATOMS)
            self._run = 0

    def _check_atom(self, value: Any) -> None:
        if type(value) is int and not SMALLEST <= value <= LARGEST:
            self.blobs.append(value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True))
            self.add(INTEGER)
            return
        if type(value) is str:
            try:
                value.encode()
            except UnicodeEncodeError:
                raise _RefusedError(
                    "the text has lone surrogates, which UTF-8 cannot encode. Send bytes, as os.fsencode() makes them"
                ) from None
        self.atoms.append(value)
        self._run += 1

    # -- containers -------------------------------------------------------------------------------------------

    def _elements(self, items: list[Any] | tuple[Any, ...], depth: int) -> None:
        if not self._careful and ATOM_TYPES.issuperset(map(type, items)):
            self.atoms += items
            self._run += len(items)
            return
        number = 0
        try:
            for number, item in enumerate(items):  # noqa: B007 - the error names it
                self.write(item, depth)
        except _RefusedError as refused:
            refused.steps.append(number)
            raise

    def write_tuple(self, value: tuple[Any, ...], depth: int) -> None:
        self._elements(value, depth)
        self.add(TUPLE, len(value))

    def write_list(self, value: list[Any], depth: int) -> None:
        items = value[:]  # another thread may change it
        self._elements(items, depth)
        self.add(LIST, len(items))

    def write_dict(self, value: dict[Any, Any], depth: int) -> None:
        items = list(value.items())  # as above
        self._check_keys([key for key, _ in items])
        for key, item in items:
            try:
                self.write(key, depth)
            except _RefusedError as refused:
                refused.steps.append(f"key {reprlib.repr(key)}")
                raise
            try:
                self.write(item, depth)
            except _RefusedError as refused:
                refused.steps.append(reprlib.repr(key))
                raise
        self.add(DICT, len(items))

    def write_set(self, value: set[Any], depth: int) -> None:
        self._set(value, depth, SET)

    def write_frozenset(self, value: frozenset[Any], depth: int) -> None:
        self._set(value, depth, FROZENSET)

    def _set(self, value: set[Any] | frozenset[Any], depth: int, code: int) -> None:
        items = list(value)
        self._check_keys(items)
        self._elements(items, depth)
        self.add(code, len(items))

    def _check_keys(self, keys: list[Any]) -> None:
        if len(keys) > MAX_COMPOSITE_KEYS and composite_count(keys) > MAX_COMPOSITE_KEYS:
            raise _RefusedError(
                f"it has more than {MAX_COMPOSITE_KEYS} keys that are tuples, frozensets, complex numbers, ranges or "
                "integers of more than 64 bits. Send a list of pairs"
            )
        self._compared += compared_elements(keys)
        if self._compared > MAX_COMPARED:
            raise _RefusedError("its dicts and sets have too many long tuples as keys. Send lists of pairs")

    def write_slice(self, value: slice, depth: int) -> None:
        self._elements((value.start, value.stop, value.step), depth)
        self.add(SLICE)

    # -- others -----------------------------------------------------------------------------------------------

    def write_range(self, value: range, depth: int) -> None:
        parts = value.start, value.stop, value.step
        if not all(map(is_atom, parts)):
            raise _RefusedError("it is a range of integers of more than 64 bits")
        self._elements(parts, depth)
        self.add(RANGE)

    def write_complex(self, value: complex, depth: int) -> None:
        self._elements((value.real, value.imag), depth)
        self.add(COMPLEX)

    def write_size(self, value: torch.Size, depth: int) -> None:
        self._elements(tuple(value), depth)
        self.add(SIZE, len(value))

    def write_bytes(self, value: bytes, depth: int) -> None:
        self.blobs.append(value)
        self.add(BYTES, 1)

    def write_bytearray(self, value: bytearray, depth: int) -> None:
        self.blobs.append(bytes(value))
        self.add(BYTEARRAY)

    def write_dtype(self, value: torch.dtype, depth: int) -> None:
        if value not in CODES:
            raise _RefusedError(f"{value} has no number in the protocol")
        self.add(DTYPE, CODES[value])

    def write_device(self, value: torch.device, depth: int) -> None:
        self._elements((str(value),), depth)
        self.add(DEVICE)

    def write_layout(self, value: torch.layout, depth: int) -> None:
        self.add(LAYOUT, LAYOUTS.index(value))

    def write_sent_as_int(self, value: int, depth: int) -> None:
        self._elements((int.__int__(value),), depth)

    def write_tensor(self, value: torch.Tensor, depth: int) -> None:
        self._attach(value, TENSOR)

    def write_parameter(self, value: torch.Tensor, depth: int) -> None:
        self._attach(value, PARAMETER)

    def _attach(self, value: torch.Tensor, code: int) -> None:
        if value.__dict__:
            raise _RefusedError(
                f"the tensor has attributes ({', '.join(sorted(value.__dict__))}), which plain data cannot carry. Send "
                "value.view_as(value), which has none"
            )
        index = self._indices.get(id(value))
        if index is None:
            index = self._indices[id(value)] = len(self.attachments) + len(self.references)
            self.attachments.append(value)
        self.add(code, index)

    def write_reference(self, value: Reference, depth: int) -> None:
        index = len(self.attachments) + len(self.references)
        self.references.append((index, value))
        self.add(REFERENCE, index)


_Write = Callable[[_Writer, Any, int], None]

_WRITERS: dict[type, _Write] = {
    tuple: _Writer.write_tuple,
    list: _Writer.write_list,
    dict: _Writer.write_dict,
    set: _Writer.write_set,
    frozenset: _Writer.write_frozenset,
    slice: _Writer.write_slice,
    range: _Writer.write_range,
    complex: _Writer.write_complex,
    bytes: _Writer.write_bytes,
    bytearray: _Writer.write_bytearray,
    torch.Size: _Writer.write_size,
    torch.dtype: _Writer.write_dtype,
    torch.device: _Writer.write_device,
    torch.layout: _Writer.write_layout,
    torch.Tensor: _Writer.write_tensor,
    torch.nn.Parameter: _Writer.write_parameter,
}


def _writer_of(kind: type) -> _Write:
    if issubclass(kind, Reference):
        return _Writer.write_reference
    if issubclass(kind, int) and getattr(kind, SENT_AS_INT, False):
        return _Writer.write_sent_as_int
    raise _RefusedError(_why_not(kind))


def _why_not(kind: type) -> str:
    name = f"{kind.__module__}.{kind.__qualname__}"
    if issubclass(kind, torch.nn.Module):
        remedy = "Expose its class, and create the module on the worker that is to have it"
    elif issubclass(kind, torch.Tensor):
        remedy = "Of tensors, only torch.Tensor and Parameter are plain: convert it with as_subclass(torch.Tensor)"
    elif issubclass(kind, type) or any("__call__" in base.__dict__ for base in kind.__mro__):
        remedy = "Functions and classes are never sent: expose it on the other worker, and name it there"
    elif kind.__module__ == "numpy":
        remedy = "Send a tensor (torch.from_numpy) or a Python number (its item())"
    else:
        remedy = "Send the plain data that it is made of"
    return f"it is a {name}, and only plain data is sent ({PLAIN_TYPES}). {remedy}"
