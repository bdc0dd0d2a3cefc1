"""The codec of registered mode: bytes of a party that must not be able to do harm."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from fuzz.mutators import mutate_msgpack
from fuzz.target import Target
from telegrad.errors import PayloadError, ProtocolError
from telegrad.wire import plain_decode, plain_encode

TYPES = (type(None), bool, int, float, str, bytes, bytearray, complex, range, slice, torch.dtype, torch.device)
MOST_VALUES = 10_000


def _run(data: bytes) -> None:
    attachments = [torch.ones(2), torch.ones(1, requires_grad=True)]
    value = plain_decode.decode(data, attachments)
    _check(value)
    encoded = plain_encode.encode(value)
    again = plain_decode.decode(encoded.data, encoded.attachments)
    assert type(again) is type(value)


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
    values = (
        ((), {}),
        ((1, 2.5, "text", None, True, b"bytes"), {"a": [1, (2, {3}), frozenset({4})]}),
        ((x, torch.nn.Parameter(x)), {"y": x}),
        (2**100, -(2**70), 1 + 2j, range(3), slice(1, None, 2), bytearray(b"x")),
        (torch.float32, torch.device("cpu"), torch.Size([1, 2]), torch.strided),
        [[[[[[1]]]]], {"k": {(1, 2): "composite key"}}],
    )
    for value in values:
        yield plain_encode.encode(value).data


PLAIN = Target("plain", _run, (ProtocolError, PayloadError), _seeds, mutate_msgpack)
