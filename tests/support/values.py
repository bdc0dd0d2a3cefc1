"""Values to send, and how a message carries them."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import torch

from telegrad.wire.payload import Encoded, decode, encode
from telegrad.wire.tensors import decode_tensors, encode_tensors


def carried(encoded: Encoded) -> Any:
    """Decode an encoded value, with its attachments copied through a region."""
    layout = encode_tensors(encoded.attachments)
    region = bytearray(layout.size)
    layout.write(region)
    return decode(encoded.data, decode_tensors(layout.descriptors, region))


def sent(value: object, **options: Any) -> Any:
    return carried(encode(value, **options))


@dataclasses.dataclass
class Batch:
    inputs: torch.Tensor
    labels: list[torch.Tensor]
    name: str = "b"


class Pair(NamedTuple):
    first: Any
    second: Any


class Slotted:
    __slots__ = ("lock", "value")

    def __init__(self, value: object) -> None:
        self.value = value


class Holder:
    def __init__(self, **attributes: object) -> None:
        self.__dict__.update(attributes)

    @staticmethod
    def static(x: int) -> int:
        return x

    @classmethod
    def make(cls) -> Holder:
        return cls()

    def method(self) -> Holder:
        return self


class Inheriting(Holder):
    pass


def module_level(x: int) -> int:
    return x + 1
