from __future__ import annotations

import pytest
import torch

from telegrad.wire import plain_decode, plain_encode
from telegrad.wire.plain_fast_path import MAX_SIZE, NOT_FOUND, decode, decode_atoms, encode


@pytest.mark.parametrize(
    "value",
    [
        *(None, 1, 2.5, "x", True, torch.ones(2), ((), {}), ((1, "x", None), {}), ((torch.ones(1),), {})),
        *((tuple(range(8)), {}), (tuple(torch.ones(1) for _ in range(8)), {})),
    ],
    ids=lambda value: str(value)[:30],
)
def test_the_bytes_are_those_of_a_walk(value: object) -> None:
    fast = encode(value)
    assert fast is not None
    walked = plain_encode._encode(value, careful=False)
    assert fast[0] == walked.data
    assert [id(x) for x in fast[1]] == [id(x) for x in walked.attachments]
    assert str(plain_decode.decode(fast[0], fast[1])) == str(value)


@pytest.mark.parametrize(
    "value",
    [
        *([], b"x", (), (1, 2), ([], {}), ((), []), ((), {"k": 1}), ((1, torch.ones(1)), {}), ((b"x",), {})),
        *(
            (tuple(range(9)), {}),
            1 << 70,
            "\ud800",
            ((1 << 70,), {}),
            (("\ud800",), {}),
            torch.nn.Parameter(torch.ones(1)),
        ),
    ],
    ids=lambda value: ascii(value)[:30],
)
def test_all_other_values_are_left_to_the_walk(value: object) -> None:
    assert encode(value) is None


def test_tensors_with_attributes_and_repeated_ones_are_left_to_the_walk() -> None:
    x = torch.ones(1)
    assert encode(((x, x), {})) is None
    x.tag = 1  # type: ignore[attr-defined]
    assert encode(x) is None
    assert encode(((x,), {})) is None


def test_bytes_are_found_only_with_the_right_attachments() -> None:
    call = encode(((torch.ones(1),), {}))
    assert call is not None
    assert len(call[0]) <= MAX_SIZE
    assert decode(call[0], [memoryview(b"x")]) is NOT_FOUND
    assert decode(call[0], []) is NOT_FOUND
    assert decode(b"", []) is NOT_FOUND
    none = encode(None)
    assert none is not None
    assert decode(none[0], []) is None


def test_atoms_are_found_only_if_their_number_fits() -> None:
    call = encode(((1, 2), {}))
    assert call is not None
    program = plain_decode._from_msgpack(call[0])[0]
    assert decode_atoms(program, [1, 2], []) == ((1, 2), {})
    assert decode_atoms(program, [1], []) is NOT_FOUND
    assert decode_atoms(program, [1, 2], [b""]) is NOT_FOUND
    assert decode_atoms(b"", [], []) is NOT_FOUND
