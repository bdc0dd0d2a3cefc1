"""The codec of registered mode, for values and for exceptions: bytes of a party that must not be able to do harm."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from fuzz.mutators import mutate_msgpack
from fuzz.target import Target
from telegrad.calls.exceptions import text_of, traceback_of
from telegrad.calls.plain_exceptions import decode_exception, encode_exception
from telegrad.calls.reraise import another
from telegrad.errors import DeadlineExceeded, PayloadError, ProtocolError, RemoteError, TelegradError
from telegrad.wire import plain_decode, plain_encode

TYPES = (type(None), bool, int, float, str, bytes, bytearray, complex, range, slice, torch.dtype, torch.device)
MOST_VALUES = 10_000


def _run(data: bytes) -> None:
    _run_exception(data)
    attachments = [torch.ones(2), torch.ones(1, requires_grad=True)]
    value = plain_decode.decode(data, attachments)
    _check(value)
    encoded = plain_encode.encode(value)
    again = plain_decode.decode(encoded.data, encoded.attachments)
    assert type(again) is type(value)


def _run_exception(data: bytes) -> None:
    """Do with an exception what a caller does: raise, show and forward it."""
    error, why_not = decode_exception(data)
    if error is None:
        assert why_not
        return
    kind = type(error)
    assert kind.__module__ == "builtins" or issubclass(kind, TelegradError), f"made a {kind}"
    _check(list(error.args))
    traceback_of(error, None)
    text_of(another(error))
    again, _ = decode_exception(encode_exception(error).value.data)
    assert again is None or type(again) is kind


def _check(value: object) -> None:
    """Check that nothing but plain data was made."""
    rest = [value]
    for _ in range(MOST_VALUES):
        if not rest:
            return
        found = rest.pop()
        if isinstance(found, torch.Size):
            continue
        if type(found) in (list, tuple, set, frozenset):
            rest += found  # type: ignore[arg-type]  # one of the four
        elif type(found) is dict:
            rest += [*found, *found.values()]
        else:
            plain = type(found) in TYPES or isinstance(found, torch.layout | torch.memory_format)
            assert plain or type(found) in (torch.Tensor, torch.nn.Parameter), f"made a {type(found)}"


def _seeds() -> Iterable[bytes]:
    x = torch.ones(2)
    values: tuple[Any, ...] = (
        ((), {}),
        ((1, 2.5, "text", None, True, b"bytes"), {"a": [1, (2, {3}), frozenset({4})]}),
        ((x, torch.nn.Parameter(x)), {"y": x}),
        (2**100, -(2**70), 1 + 2j, range(3), slice(1, None, 2), bytearray(b"x")),
        (torch.float32, torch.device("cpu"), torch.Size([1, 2]), torch.strided),
        [[[[[[1]]]]], {"k": {(1, 2): "composite key"}}],
    )
    for value in values:
        yield plain_encode.encode(value).data
    remote = RemoteError("text", worker="b", function="f", call=1, context=2, elapsed=0.5)
    remote.type_name = "library.Error"
    remote.add_note("a note")
    failures = (
        *(ValueError("text"), KeyError(("a", 1)), OSError(2, "No such file", "name"), StopIteration([1]), remote),
        *(UnicodeDecodeError("utf-8", b"x", 0, 1, "bad"), UnicodeEncodeError("utf-8", "x", 0, 1, "bad")),
        *(UnicodeTranslateError("x", 0, 1, "bad"), DeadlineExceeded("late", worker="b"), PayloadError("text")),
    )
    for failure in failures:
        yield encode_exception(failure).value.data


PLAIN = Target("plain", _run, (ProtocolError, PayloadError), _seeds, mutate_msgpack)
