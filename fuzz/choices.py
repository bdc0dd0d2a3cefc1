"""Turns bytes into choices, so that a fuzzer which changes bytes changes decisions.

Atheris has a `FuzzedDataProvider` for this. This one needs no atheris, so that the corpus can be replayed without it,
and reads strictly from left to right, so that libFuzzer's mutations and minimisation keep the beginning of a program.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")

EXTREMES = (
    0,
    1,
    2,
    -1,
    3,
    255,
    2**15,
    2**16,
    2**31 - 1,
    2**31,
    2**32,
    2**40,
    2**48,
    2**53,
    2**63 - 1,
    2**63,
    2**64 - 1,
)
"""Integers at which sizes, ids and counters overflow. All fit in msgpack, as does -2**63."""


class Choices:
    """Choices read from bytes. When the bytes are used up, every choice is the first one."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def __bool__(self) -> bool:
        return self._at < len(self._data)

    def byte(self) -> int:
        """Return the next byte, 0 at the end."""
        if self._at >= len(self._data):
            return 0
        self._at += 1
        return self._data[self._at - 1]

    def integer(self, size: int = 8) -> int:
        """Return an unsigned integer of `size` bytes."""
        return int.from_bytes(self.take(size).ljust(size, b"\0"), "little")

    def below(self, limit: int) -> int:
        """Return an integer from 0 to `limit` - 1."""
        return (self.byte() if limit <= 256 else self.integer(4)) % limit

    def flag(self) -> bool:
        """Return True or False."""
        return bool(self.byte() & 1)

    def rarely(self) -> bool:
        """Return True for one byte in 16, not for 0."""
        return self.byte() & 15 == 15

    def pick(self, options: Sequence[T]) -> T:
        """Return one of `options`."""
        return options[self.below(len(options))]

    def number(self, usual: int = 4) -> int:
        """Return a small integer, mostly, or an extreme one."""
        choice = self.byte()
        if choice < 192:
            return choice % usual
        return EXTREMES[choice % len(EXTREMES)] if choice < 250 else self.integer() - 2**63

    def take(self, count: int) -> bytes:
        """Return the next `count` bytes, fewer at the end."""
        found = self._data[self._at : self._at + count]
        self._at += len(found)
        return found

    def rest(self) -> bytes:
        """Return all bytes that are left."""
        return self.take(len(self._data))
