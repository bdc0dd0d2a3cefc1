"""References keep their positions among tensors, containers and closures."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from telegrad.errors import PayloadError
from telegrad.wire.payload import decode, encode
from telegrad.wire.reference import Reference


class Name(Reference):
    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Name) and other.number == self.number

    def __hash__(self) -> int:
        return self.number


leaves = (
    st.integers(0, 5).map(Name)
    | st.integers(0, 5).map(lambda n: torch.full((n,), float(n)))
    | st.integers()
    | st.binary(max_size=4).map(bytearray)
)
values = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=2), inner, max_size=3),
    max_leaves=12,
)


def received(value: object) -> Any:
    """Encode and decode a value, with each reference replaced by one of the receiver, as in a message."""
    encoded = encode(value)
    made = [(position, Name(reference.number)) for position, reference in encoded.references]
    assert [position for position, _ in made] == sorted({position for position, _ in made})
    return decode(encoded.data, encoded.attachments, made)


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, list):
        return len(one) == len(other) and all(map(equal, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else bool(one == other)


@given(values)
def test_references_keep_their_positions(value: object) -> None:
    assert equal(received(value), value)


@given(values)
def test_references_in_closures_round_trip(value: object) -> None:
    assert equal(received(lambda: value)(), value)


def test_a_repeated_reference_is_one_object() -> None:
    name = Name(1)
    encoded = encode([name, torch.ones(1), name])
    assert len(encoded.references) == 1
    first, _, second = received([name, torch.ones(1), name])
    assert first is second


def test_a_reference_cannot_be_pickled_outside_a_call() -> None:
    with pytest.raises(PayloadError, match="can only be sent inside a call"):
        pickle.dumps(Name(1))
