from __future__ import annotations

import contextlib
import pickle
import struct
import tracemalloc
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from telegrad.errors import PayloadError, ProtocolError
from telegrad.wire import plain_decode
from telegrad.wire.plain_decode import decode
from telegrad.wire.plain_encode import encode
from telegrad.wire.plain_format import (
    ATOMS,
    BYTEARRAY,
    BYTES,
    COMPLEX,
    DEVICE,
    DICT,
    DTYPE,
    FROZENSET,
    INTEGER,
    LAYOUT,
    LIST,
    MAX_COMPOSITE_KEYS,
    MAX_DEPTH,
    PARAMETER,
    RANGE,
    REFERENCE,
    SET,
    SIZE,
    SLICE,
    TENSOR,
    TUPLE,
)
from telegrad.wire.reference import Reference


class Held(Reference):
    """A reference without a value."""


def data_of(*operations: tuple[int, int], atoms: Any = (), blobs: Any = ()) -> bytes:
    """Return hand-made data from pairs of a code and a count."""
    program = b"".join(struct.pack("<I", (count << 5 | code) & 0xFFFFFFFF) for code, count in operations)
    return msgspec.msgpack.encode((program, list(atoms), list(blobs)))


def harmless(data: bytes, attachments: Any = (), references: Any = ()) -> None:
    """Decode bytes that may be anything. Every error but telegrad's own fails the test."""
    with contextlib.suppress(ProtocolError, PayloadError):
        decode(data, attachments, references)


@given(st.binary())
@example(pickle.dumps((1, 2)))
@example(b"\x93\xc4\x04\x00\x00\x00\x00\x90\x90")
@example(b"\x91" * 100_000)
@example(b"\x93\xc4\x00\xdd\xff\xff\xff\xff")
def test_any_bytes_are_refused_cleanly(data: bytes) -> None:
    harmless(data)
    harmless(memoryview(data))  # type: ignore[arg-type]


operation = st.tuples(st.integers(0, 31), st.integers(0, 6) | st.integers(0, (1 << 27) - 1))
atom = st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.floats() | st.text(max_size=5)


@given(st.lists(operation, max_size=12), st.lists(atom, max_size=6), st.lists(st.binary(max_size=4), max_size=3))
def test_any_operations_are_refused_cleanly(operations: Any, atoms: Any, blobs: Any) -> None:
    harmless(data_of(*operations, atoms=atoms, blobs=blobs), [torch.ones(1), memoryview(b"x")], [(1, Held())])


@given(st.data())
def test_changed_data_is_refused_cleanly(draw: st.DataObject) -> None:
    value = ((torch.ones(1), {"a": [1, (2.5, "x")], (1, 2): {3}}), {"k": slice(1, range(3), 1 << 70)})
    encoded = encode(value)
    data = bytearray(encoded.data)
    for _ in range(draw.draw(st.integers(1, 4))):
        data[draw.draw(st.integers(0, len(data) - 1))] = draw.draw(st.integers(0, 255))
    harmless(bytes(data), encoded.attachments)
    harmless(encoded.data[: draw.draw(st.integers(0, len(data)))], encoded.attachments)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (data_of(), "0 values"),
        (data_of((ATOMS, 2), atoms=[1, 2]), "2 values"),
        (data_of((ATOMS, 1), atoms=[1, 2]), "1 of 2 atoms"),
        (data_of((ATOMS, 3), (TUPLE, 1), atoms=[1]), "3 of 1 atoms"),
        (data_of((BYTES, 1), blobs=[b"x", b"y"]), "1 of 2 blobs"),
        (data_of((BYTES, 2), (TUPLE, 1), blobs=[b"x"]), "2 of 1 blobs"),
        (data_of((TUPLE, 1)), "stack of 0"),
        (data_of((ATOMS, 1), (DICT, 1), atoms=[1]), "takes 2 values"),
        (data_of((LIST, 0), (SET, 1)), "unhashable"),
        (data_of((LIST, 0), (ATOMS, 1), (DICT, 1), atoms=[1]), "unhashable"),
        (data_of((ATOMS, 2), (COMPLEX, 0), atoms=[1, 2.0]), "complex number"),
        (data_of((ATOMS, 3), (RANGE, 0), atoms=[1, 2, 0.5]), "range"),
        (data_of((ATOMS, 3), (RANGE, 0), atoms=[1, 2, 0]), "zero"),
        (data_of((ATOMS, 1), (SIZE, 1), atoms=["x"]), "torch.Size"),
        (data_of((ATOMS, 1), (DEVICE, 0), atoms=["nothing"]), "device"),
        (data_of((ATOMS, 1), (DEVICE, 0), atoms=[5]), "device without a name"),
        (data_of((ATOMS, 1), (DEVICE, 0), atoms=["c" * 1000]), "device without a name"),
        (data_of((DTYPE, 5000)), "index"),
        (data_of((LAYOUT, 5000)), "index"),
        (data_of((31, 0)), "unknown operation 31"),
        (data_of((BYTEARRAY, 0)), "index"),
        (data_of((INTEGER, 0)), "index"),
        (data_of((TENSOR, 7)), "index"),
        (data_of((REFERENCE, 0)), "attachment 0 is a Tensor"),
        (data_of((TENSOR, 1)), "attachment 1 is a memoryview"),
        (data_of((PARAMETER, 1)), "attachment 1 is a memoryview"),
        (data_of((TENSOR, 2)), "attachment 2 is a Held"),
        (msgspec.msgpack.encode((b"abc", [], [])), "not plain data"),
        (msgspec.msgpack.encode((b"", [[1]], [])), "got `array`"),
        (msgspec.msgpack.encode((b"", [{}], [])), "got `object`"),
        (msgspec.msgpack.encode((b"", [], ["x"])), "got `str`"),
        (b"\x93\xc4\x00\x91\xa1\xff\x90", "utf-8"),
    ],
)
def test_data_that_no_encoder_makes_is_refused(data: bytes, why: str) -> None:
    with pytest.raises(ProtocolError, match=why):
        decode(data, [torch.ones(1), memoryview(b"x")], [(2, Held())])


def test_data_of_a_call_with_other_attachments_than_tensors_is_refused() -> None:
    call = encode(((torch.ones(1),), {})).data
    assert decode(call, [torch.ones(1)]) == ((torch.ones(1),), {})
    for attachments in ([], [memoryview(b"x")], [Held()]):
        with pytest.raises(ProtocolError):
            decode(call, attachments)
    assert decode(encode(None).data, [torch.ones(1)]) is None


def test_a_reference_at_an_impossible_place_is_refused_where_it_is_used() -> None:
    data = data_of((REFERENCE, 0))
    held = Held()
    assert decode(data, [], [((1 << 64) - 1, held)]) is held
    with pytest.raises(ProtocolError):
        decode(data, [torch.ones(1)], [(1 << 62, held)])


def test_nesting_is_limited_in_every_kind_of_container() -> None:
    for step in ([(TUPLE, 1)], [(LIST, 1)], [(FROZENSET, 1), (TUPLE, 1)], [(ATOMS, 2), (SLICE, 0)]):
        levels = MAX_DEPTH // len([code for code, _ in step if code != ATOMS])
        atoms = [1] + [None] * 2 * (levels + 1)
        within = [(ATOMS, 1), *step * levels]
        used = 1 + 2 * levels * ((ATOMS, 2) in step)
        decode(data_of(*within, atoms=atoms[:used]), ())
        with pytest.raises(ProtocolError, match="nested deeper"):
            decode(data_of(*within, *step, atoms=atoms), ())


def test_a_tuple_of_a_million_levels_does_not_overflow_the_stack() -> None:
    data = data_of((ATOMS, 1), *[(TUPLE, 1)] * 1_000_000, (SET, 1), atoms=[1])
    with pytest.raises(ProtocolError, match="nested deeper"):
        decode(data, ())


def test_siblings_do_not_add_to_the_depth() -> None:
    value = [[[number]] for number in range(1000)]
    assert decode(encode(value).data, ()) == value


def test_keys_with_equal_hashes_are_refused_before_they_are_hashed() -> None:
    equal = [(number + 1) * (2**61 - 1) << 64 for number in range(MAX_COMPOSITE_KEYS + 1)]
    assert len(set(map(hash, equal))) == 1
    blobs = [number.to_bytes(30, "little") for number in equal]
    for operations in ([(SET, len(equal))], [(FROZENSET, len(equal))]):
        with pytest.raises(ProtocolError, match="composite keys"):
            decode(data_of(*[(INTEGER, 0)] * len(equal), *operations, blobs=blobs), ())
    doubled = [blob for blob in blobs for _ in range(2)]
    with pytest.raises(ProtocolError, match="composite keys"):
        decode(data_of(*[(INTEGER, 0)] * len(doubled), (DICT, len(equal)), blobs=doubled), ())


def test_keys_that_take_long_to_compare_are_refused_before_they_are_hashed() -> None:
    # 400 floats, and an integer that makes all hashes equal: comparing them takes a second per megabyte, in which no
    # other thread runs.
    equal = [(number + 1) * (2**61 - 1) << 64 for number in range(1000)]
    blobs = [number.to_bytes(30, "little") for number in equal]
    keys = [(ATOMS, 400), (INTEGER, 0), (TUPLE, 401)] * len(equal)
    with pytest.raises(ProtocolError, match="too many long composite keys"):
        decode(data_of(*keys, (SET, len(equal)), blobs=blobs, atoms=[0.5] * 400_000), ())


def test_many_sets_of_keys_with_equal_hashes_are_refused() -> None:
    equal = [(number + 1) * (2**61 - 1) << 64 for number in range(1000)]
    blobs = [number.to_bytes(30, "little") for number in equal]
    one = [(INTEGER, 0)] * len(equal) + [(SET, len(equal))]
    assert decode(data_of(*one, blobs=blobs), ()) == set(equal)
    with pytest.raises(ProtocolError, match="too many long composite keys"):
        decode(data_of(*one * 20, (LIST, 20), blobs=blobs * 20), ())


def test_a_range_of_long_integers_is_refused_before_its_length_is_computed() -> None:
    numbers = [0, 1 << (8 << 20), (1 << (4 << 20)) + 1]  # to divide them would take minutes
    blobs = [number.to_bytes(number.bit_length() // 8 + 1, "little") for number in numbers]
    with pytest.raises(ProtocolError, match="integers of at most 64 bits"):
        decode(data_of(*[(INTEGER, 0)] * 3, (RANGE, 0), blobs=blobs), ())


def test_a_value_with_too_many_elements_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain_decode, "MAX_ELEMENTS", 10)
    with pytest.raises(ProtocolError, match="more than 20 elements"):
        decode(encode(list(range(20))).data, ())


@pytest.mark.parametrize(("code", "table"), [(DTYPE, "DTYPES"), (LAYOUT, "LAYOUTS")])
def test_what_this_torch_does_not_have_is_an_error_that_says_so(
    code: int, table: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plain_decode, table, (None,) * 100)
    with pytest.raises(PayloadError, match="has no such object"):
        decode(data_of((code, 1)), ())


@pytest.mark.parametrize(
    "data",
    [
        data_of(*[(SET, 0)] * 50_000, (LIST, 50_000)),
        data_of(*[(DICT, 0)] * 50_000, (LIST, 50_000)),
        data_of(*[(LIST, 0)] * 50_000, (TUPLE, 50_000)),
        data_of((ATOMS, 50_000), (TUPLE, 50_000), atoms=[-20] * 50_000),
        data_of((ATOMS, 50_000), (SET, 50_000), atoms=range(50_000)),
        data_of((ATOMS, 50_000), (LIST, 50_000), atoms=["ab"] * 50_000),
        data_of((ATOMS, 1), *[(TENSOR, 0)] * 50_000, (LIST, 50_001), atoms=[1]),
    ],
)
def test_memory_is_limited_by_the_length_of_the_data(data: bytes) -> None:
    tensors = [torch.ones(1)]
    tracemalloc.start()
    try:
        decode(data, tensors)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 100 * len(data)
