"""The fast path writes the bytes of pickle, and handles only values that it fully supports."""

from __future__ import annotations

import collections
import copyreg
import pickle
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from telegrad.wire import fast_path
from telegrad.wire.payload import decode, encode

ATOMS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False),
    st.complex_numbers(allow_nan=False),
    st.text(),
    st.binary(),
)


def tensor(number: int) -> torch.Tensor:
    return torch.full((2,), float(number))


ARGUMENTS = st.lists(st.one_of(ATOMS, st.integers(0, 9).map(tensor)), max_size=12).map(tuple)


def same(found: Any, expected: Any) -> bool:
    """Whether both are equal, have the same types, and contain the same tensor objects."""
    if isinstance(expected, torch.Tensor):
        return found is expected
    if isinstance(expected, tuple):
        return (
            type(found) is tuple
            and len(found) == len(expected)
            and all(same(a, b) for a, b in zip(found, expected, strict=True))
        )
    return type(found) is type(expected) and found == expected


@given(ARGUMENTS)
def test_a_call_with_atoms_and_tensors_is_decoded_by_pickle_and_by_payload(args: tuple[Any, ...]) -> None:
    data, attachments = fast_path.encode((args, {})) or (b"", [])
    assert same(pickle.loads(data, buffers=attachments), (args, {}))
    assert same(decode(data, attachments), (args, {}))
    encoded = encode((args, {}))
    assert (encoded.data, len(encoded.attachments)) == (data, len(attachments))


@given(st.one_of(ATOMS, st.integers(0, 9).map(tensor)))
def test_a_result_that_is_an_atom_or_a_tensor_round_trips(value: Any) -> None:
    data, attachments = fast_path.encode(value) or (b"", [])
    assert same(pickle.loads(data, buffers=attachments), value)
    assert same(decode(data, attachments), value)


def test_every_call_gets_a_new_dict_of_keyword_arguments() -> None:
    first: Any = decode(encode(((), {})).data, [])
    second: Any = decode(encode(((), {})).data, [])
    first[1]["x"] = 1
    assert second == ((), {})


class Number(int):
    """A subclass may have extra state."""


class Text(str):
    pass


def _with_attribute() -> torch.Tensor:
    x = torch.ones(2)
    x.note = "kept"  # type: ignore[attr-defined]  # tensors accept any attribute
    return x


twice = torch.ones(2)


@pytest.mark.parametrize(
    "value",
    [
        ((1,), {"key": 1}),
        ([1], {}),
        ((Number(1),), {}),
        ((Text("a"),), {}),
        (([],), {}),
        ((torch.nn.Parameter(torch.ones(2)),), {}),
        ((_with_attribute(),), {}),
        ((twice, twice), {}),
        ((1,), collections.OrderedDict()),
        (torch.float32,),
        _with_attribute(),
        Number(1),
        (),
        ((),),
        ((), {}, {}),
    ],
    ids=repr,
)
def test_other_values_do_not_take_the_fast_path(value: object) -> None:
    assert fast_path.encode(value) is None


def test_a_repeated_tensor_is_received_as_one_object() -> None:
    encoded = encode(((twice, twice), {}))
    (first, second), _ = decode(encoded.data, encoded.attachments)  # type: ignore[misc]  # the encoded value
    assert first is second


def test_reducers_registered_for_atoms_are_ignored_as_in_pickle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(copyreg.dispatch_table, int, lambda x: (str, ("changed",)))
    assert decode(encode(((1,), {})).data, []) == pickle.loads(pickle.dumps(((1,), {}))) == ((1,), {})


def test_known_bytes_with_the_wrong_number_of_attachments_are_not_found() -> None:
    data = encode(((torch.ones(2),), {})).data
    assert fast_path.decode(data, []) is fast_path.NOT_FOUND
    assert fast_path.decode(data, [1, 2]) is fast_path.NOT_FOUND
    assert fast_path.decode(encode(torch.ones(2)).data, []) is fast_path.NOT_FOUND
