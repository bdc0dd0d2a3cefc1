"""Descriptors from a peer are checked before they are used."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from telegrad.errors import LimitExceeded, PayloadError, ProtocolError
from telegrad.wire import descriptors
from telegrad.wire.descriptors import (
    CODES,
    DTYPE_NAMES,
    DTYPES,
    STRIDED,
    TensorDescriptor,
    checked_extent,
    code_of,
    dtype_of,
    extent_of,
    integers_of,
)


def describe(dtype: int = 0, shape: tuple[int, ...] = (4,), stride: tuple[int, ...] = ()) -> TensorDescriptor:
    return TensorDescriptor(STRIDED, dtype, 0, shape, stride)


def test_the_codes_of_dtypes_never_change() -> None:
    """Workers of different versions agree on these numbers."""
    assert [DTYPE_NAMES.index(name) for name in ("bool", "float32", "bfloat16", "complex64", "qint8")] == [
        0,
        11,
        10,
        14,
        41,
    ]
    for dtype, code in CODES.items():
        assert code_of(dtype) == code
        assert DTYPES[code] is dtype


def test_a_dtype_without_a_code_is_refused() -> None:
    with pytest.raises(PayloadError, match=r"torch.quint4x2 cannot be sent"):
        code_of(torch.quint4x2)


def test_a_dtype_that_this_torch_does_not_have_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    code = CODES[torch.bfloat16]
    monkeypatch.setattr(descriptors, "DTYPES", (*DTYPES[:code], None, *DTYPES[code + 1 :]))
    with pytest.raises(PayloadError, match=r"received a tensor of torch.bfloat16, but torch .* has no such dtype"):
        dtype_of(describe(code))


@pytest.mark.parametrize("code", [-1, CODES[torch.qint8], 1000])
def test_an_unknown_code_is_refused(code: int) -> None:
    with pytest.raises(ProtocolError, match=f"unknown dtype {code}"):
        dtype_of(describe(code))


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5)), max_size=4))
def test_the_extent_is_the_memory_that_torch_needs(dimensions: list[tuple[int, int]]) -> None:
    shape, stride = tuple(size for size, _ in dimensions), tuple(step for _, step in dimensions)
    extent = extent_of(shape, stride)
    assert torch.zeros(extent).as_strided(shape, stride).shape == shape
    assert checked_extent(describe(shape=shape, stride=stride)) == extent
    if extent > 1:
        with pytest.raises(RuntimeError):
            torch.from_numpy(torch.zeros(extent - 1).numpy()).as_strided(shape, stride)


def test_strides_beyond_any_memory_are_refused() -> None:
    with pytest.raises(LimitExceeded, match="larger than any memory"):
        checked_extent(describe(shape=(2,), stride=(2**62,)))
    with pytest.raises(ProtocolError, match="strides"):
        checked_extent(describe(shape=(2,), stride=(2**63,)))


def test_details_must_be_integers_of_the_right_number() -> None:
    for detail in ((1,), (1, 2, 3), (1, 0.5)):
        with pytest.raises(ProtocolError, match="invalid details"):
            integers_of(TensorDescriptor(STRIDED, 0, 0, (), detail=detail), 2)
    assert integers_of(TensorDescriptor(STRIDED, 0, 0, (), detail=(1, 2)), 2) == (1, 2)
