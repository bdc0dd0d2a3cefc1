"""The short way for common values writes what pickle reads, and takes nothing that it does not fully understand."""

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
    """Equal, of the same types, and with the very same tensors."""
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
def test_a_call_with_atoms_and_tensors_is_read_back_by_plain_pickle_and_by_us(args: tuple[Any, ...]) -> None:
    data, attachments = fast_path.encode((args, {})) or (b"", [])
    assert same(pickle.loads(data, buffers=attachments), (args, {}))
    assert same(decode(data, attachments), (args, {}))
    encoded = encode((args, {}))
    assert (encoded.data, len(encoded.attachments)) == (data, len(attachments))


@given(st.one_of(ATOMS, st.integers(0, 9).map(tensor)))
def test_a_result_that_is_an_atom_or_a_tensor_is_read_back(value: Any) -> None:
    data, attachments = fast_path.encode(value) or (b"", [])
    assert same(pickle.loads(data, buffers=attachments), value)
    assert same(decode(data, attachments), value)


def test_every_call_gets_keyword_arguments_of_its_own() -> None:
    first: Any = decode(encode(((), {})).data, [])
    second: Any = decode(encode(((), {})).data, [])
    first[1]["x"] = 1
    assert second == ((), {})


class Number(int):
    """A subclass may have a state of its own."""


class Text(str):
    pass


def _with_attribute() -> torch.Tensor:
    x = torch.ones(2)
    x.note = "kept"  # type: ignore[attr-defined]  # any tensor takes attributes
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
def test_what_is_anything_more_goes_the_long_way(value: object) -> None:
    assert fast_path.encode(value) is None


def test_one_tensor_twice_still_arrives_as_one() -> None:
    encoded = encode(((twice, twice), {}))
    (first, second), _ = decode(encoded.data, encoded.attachments)  # type: ignore[misc]  # it is what was encoded
    assert first is second


def test_what_the_program_registered_for_an_atom_changes_nothing_as_in_pickle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(copyreg.dispatch_table, int, lambda x: (str, ("changed",)))
    assert decode(encode(((1,), {})).data, []) == pickle.loads(pickle.dumps(((1,), {}))) == ((1,), {})


def test_bytes_that_are_known_with_attachments_that_do_not_fit_are_read_the_long_way() -> None:
    data = encode(((torch.ones(2),), {})).data
    assert fast_path.decode(data, []) is fast_path.NOT_FOUND
    assert fast_path.decode(data, [1, 2]) is fast_path.NOT_FOUND
    assert fast_path.decode(encode(torch.ones(2)).data, []) is fast_path.NOT_FOUND
