from __future__ import annotations

import collections
import contextlib
import dataclasses
import enum
import sys
import threading
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from telegrad.errors import PayloadError
from telegrad.wire import plain_encode, plain_format
from telegrad.wire.plain_decode import decode
from telegrad.wire.plain_encode import encode
from telegrad.wire.reference import Reference


class Held(Reference):
    """A reference without a value."""


class Number(int):
    _telegrad_sent_as_int = True


class Color(enum.IntEnum):
    RED = 1


class Pair(tuple[int, int]):
    __slots__ = ()


@dataclasses.dataclass
class Point:
    x: int


class Callable_:  # noqa: N801 - its name is in an error
    def __call__(self) -> None: ...


def there_and_back(value: object) -> Any:
    encoded = encode(value)
    return decode(encoded.data, encoded.attachments, encoded.references)


def same(one: Any, other: Any) -> bool:
    """Whether two values have the same types and contents. NaN equals NaN, and 0.0 is not -0.0."""
    if type(one) is not type(other):
        return False
    if isinstance(one, float):
        return repr(one) == repr(other)
    if isinstance(one, complex):
        return same(one.real, other.real) and same(one.imag, other.imag)
    if isinstance(one, dict):
        return len(one) == len(other) and all(
            same(a, b) and same(x, y) for (a, x), (b, y) in zip(one.items(), other.items(), strict=True)
        )
    if isinstance(one, tuple | list):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, slice):
        return same((one.start, one.stop, one.step), (other.start, other.stop, other.step))
    return bool(one == other)


numbers = st.integers(-(1 << 80), 1 << 80)
atoms = st.none() | st.booleans() | numbers | st.floats() | st.text() | st.binary() | st.complex_numbers()
hashable = st.recursive(
    st.none() | st.booleans() | numbers | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=3),
    max_leaves=5,
)
plain = st.recursive(
    atoms
    | st.binary().map(bytearray)
    | st.sampled_from(
        [torch.float32, torch.bool, torch.strided, torch.sparse_coo, torch.device("cpu"), torch.Size([2, 3])]
    )
    | st.builds(range, st.integers(-9, 9), st.integers(-(1 << 63), (1 << 64) - 1), st.integers(1, 9)),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(hashable, inner, max_size=4)
        | st.sets(hashable, max_size=4)
        | st.builds(slice, inner, inner, inner)
    ),
    max_leaves=20,
)


@given(plain)
def test_plain_data_arrives_as_it_was_sent(value: object) -> None:
    assert same(there_and_back(value), value)


@given(st.tuples(st.lists(atoms, max_size=10).map(tuple), st.dictionaries(st.text(max_size=3), plain, max_size=2)))
def test_arguments_arrive_as_they_were_sent(value: object) -> None:
    assert same(there_and_back(value), value)


@pytest.mark.parametrize("count", range(11))
def test_any_number_of_tensors_arrives_in_order(count: int) -> None:
    tensors = tuple(torch.full((2,), float(number)) for number in range(count))
    args, kwargs = there_and_back((tensors, {}))
    assert type(args) is tuple
    assert kwargs == {}
    assert [tensor[0].item() for tensor in args] == list(range(count))


def test_a_repeated_tensor_is_sent_once_and_stays_one() -> None:
    x = torch.ones(2)
    encoded = encode(((x, x), {"x": x}))
    assert len(encoded.attachments) == 1
    (one, two), kwargs = decode(encoded.data, encoded.attachments)  # type: ignore[misc]
    assert one is two is kwargs["x"]
    assert len(encode(((x, x), {})).attachments) == 1


def test_tensors_keep_whether_they_require_grad() -> None:
    leaf = torch.ones(2, requires_grad=True)
    assert there_and_back([leaf])[0].requires_grad


def test_a_parameter_arrives_as_a_parameter_unless_it_has_an_edge() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    encoded = encode([parameter])
    received = torch.ones(2, requires_grad=True)
    (made,) = decode(encoded.data, [received])  # type: ignore[misc]
    assert type(made) is torch.nn.Parameter
    assert made.requires_grad
    with torch.inference_mode():
        (made,) = decode(encoded.data, [torch.ones(2)])  # type: ignore[misc]
    assert type(made) is torch.nn.Parameter
    with_edge = received * 1
    assert decode(encoded.data, [with_edge])[0] is with_edge  # type: ignore[index]


def test_references_are_listed_by_their_place_among_the_attachments() -> None:
    one, two, x = Held(), Held(), torch.ones(1)
    encoded = encode([one, x, {"two": two}])
    assert [position for position, _ in encoded.references] == [0, 2]
    received = decode(encoded.data, encoded.attachments, encoded.references)
    assert received == [one, x, {"two": two}]


def test_a_marked_subclass_of_int_arrives_as_an_int() -> None:
    assert same(there_and_back([Number(5)]), [5])
    assert same(there_and_back([Number(1 << 70)]), [1 << 70])


@pytest.mark.parametrize(
    ("value", "part"),
    [
        ((({"model": object()},), {}), r"args\[0\]\['model'\]"),
        (((), {"model": [1, object()]}), r"kwargs\['model'\]\[1\]"),
        (((1,), {"x": {(1, object()): 2}}), r"kwargs\['x'\]\[key \(1, .*\)\]\[1\]"),
        (((slice(None, object()),), {}), r"args\[0\]\[1\]"),
        ((({object()},), {}), r"args\[0\]\[0\]"),
        (((1, "\ud800"), {}), r"args\[1\]"),
    ],
)
def test_an_error_names_the_part_that_is_not_plain(value: object, part: str) -> None:
    with pytest.raises(PayloadError, match=f"^{part} cannot be sent in registered mode: "):
        encode(value, root=("args", "kwargs"))


def test_an_error_about_the_whole_value_names_all_its_roots() -> None:
    with pytest.raises(PayloadError, match=r"^args or kwargs cannot be sent"):
        encode(object(), root=("args", "kwargs"))
    with pytest.raises(PayloadError, match=r"^result\[0\] cannot be sent"):
        encode([object()], root="result")


@pytest.mark.parametrize(
    "value",
    [
        *(True.__class__, len, lambda: None, Callable_(), object(), Point(1), Color.RED, Pair((1, 2)), ValueError("x")),
        *(collections.OrderedDict(), collections.namedtuple("N", "a")(1), collections.Counter(), threading.Lock()),
        *(torch.nn.Linear(1, 1), torch.Generator(), torch.ones(2).as_subclass(type("Mine", (torch.Tensor,), {}))),
        *(memoryview(b"x"), Ellipsis, sys, torch.ones(1).untyped_storage(), torch.preserve_format),
    ],
    ids=lambda value: type(value).__name__,
)
def test_values_of_other_types_are_refused(value: object) -> None:
    for nested in (value, [value], ((value,), {}), {"k": value}):
        with pytest.raises(PayloadError, match="only plain data is sent"):
            encode(nested)


@pytest.mark.parametrize(
    ("value", "remedy"),
    [
        (torch.nn.Linear(1, 1), "Expose its class"),
        (torch.ones(1).as_subclass(type("Mine", (torch.Tensor,), {})), "as_subclass"),
        (print, "Functions and classes are never sent"),
        (Point, "Functions and classes are never sent"),
        (numpy.ones(1), "torch.from_numpy"),
        (numpy.float64(1), "torch.from_numpy"),
        (Point(1), "Send the plain data that it is made of"),
    ],
)
def test_an_error_says_what_to_send_instead(value: object, remedy: str) -> None:
    with pytest.raises(PayloadError, match=remedy):
        encode(value)


def test_a_tensor_with_attributes_is_refused_because_they_would_be_lost() -> None:
    x = torch.ones(2)
    x.tag = 1  # type: ignore[attr-defined]
    for value in (x, ((x,), {}), [x]):
        with pytest.raises(PayloadError, match=r"attributes \(tag\)"):
            encode(value)
    assert same(there_and_back(x.view_as(x)).tolist(), [1.0, 1.0])


def test_text_that_is_not_utf_8_is_refused() -> None:
    for value in ("\ud800", ["x", "\ud800"], {"\ud800": 1}, (("\ud800",), {})):
        with pytest.raises(PayloadError, match="lone surrogates"):
            encode(value)


def test_a_value_that_contains_itself_is_refused() -> None:
    value: list[Any] = []
    value.append(value)
    with pytest.raises(PayloadError, match="contains itself"):
        encode(value)


def test_the_depth_is_limited_on_both_sides_alike() -> None:
    value: Any = 1
    for _ in range(plain_format.MAX_DEPTH):
        value = (value,)
    assert there_and_back(value) == value
    with pytest.raises(PayloadError, match="nested deeper"):
        encode((value,))


def test_shared_containers_do_not_grow_without_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain_encode, "MAX_ELEMENTS", 1000)
    value: Any = [1]
    for _ in range(40):
        value = [value, value]
    with pytest.raises(PayloadError, match="more than 1,000 elements"):
        encode(value)
    with pytest.raises(PayloadError, match=r"^value cannot .* more than 1,000 elements"):
        encode(list(range(2000)))


def test_many_composite_keys_are_refused_and_many_simple_ones_are_not() -> None:
    many = range(plain_format.MAX_COMPOSITE_KEYS + 1)
    assert there_and_back(dict.fromkeys(many)) == dict.fromkeys(many)
    for value in ({(number,): None for number in many}, {1 << 70 | number for number in many}):
        with pytest.raises(PayloadError, match="Send a list of pairs"):
            encode(value)


@pytest.mark.parametrize(
    "element",
    [(0.5,) * 20, ("x" * 1300,), (b"x" * 1300,), ((1 << 11_000),), ((((0.5,) * 20,),),), (frozenset(range(20)),)],
    ids=["long", "text", "bytes", "integer", "nested", "frozenset"],
)
def test_keys_that_take_long_to_compare_are_refused(element: tuple[object, ...]) -> None:
    few = {(*element, number) for number in range(100)}
    assert there_and_back(few) == few
    many = {(*element, number) for number in range(1000)}
    for value in (many, dict.fromkeys(many), [few] * 100):
        with pytest.raises(PayloadError, match="too many long tuples as keys"):
            encode(value)


@pytest.mark.parametrize("value", [range(1 << 64), range(-(1 << 63) - 1, 0), range(0, 9, 1 << 70)])
def test_a_range_of_long_integers_is_refused(value: range) -> None:
    with pytest.raises(PayloadError, match="a range of integers of more than 64 bits"):
        encode([value])


def test_a_dtype_without_a_number_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain_encode, "CODES", {})
    with pytest.raises(PayloadError, match=r"torch\.float32 has no number"):
        encode([torch.float32])


def test_a_call_from_too_deep_a_stack_is_an_error_of_the_value() -> None:
    def deeper(left: int) -> object:
        return deeper(left - 1) if left else encode([[[[[[1]]]]]])

    def first_refusal() -> None:
        for left in range(sys.getrecursionlimit() - 400, sys.getrecursionlimit()):
            with contextlib.suppress(RecursionError):
                deeper(left)

    with pytest.raises(PayloadError, match="less deeply nested function"):
        first_refusal()
