"""Mutators for structured inputs: they change a value inside a msgpack or JSON document, and encode it again."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import msgspec

from fuzz.choices import EXTREMES
from fuzz.target import Mutator

_TEXTS = ("", "x", "a" * 200, "\n", "\0", "\x1b[0m", "é\u202e", "tcp://h:1", "unix:///x", "tcp://[::1]:1", "@x", "a:b")
_FLOATS = (0.0, -1.0, 1.5, float("inf"), float("-inf"), float("nan"), 1e308)


def _changed(value: Any, rng: random.Random, depth: int = 0) -> Any:
    """Return a copy of `value` in which one thing is different."""
    if isinstance(value, list) and value and (depth < 1 or rng.random() < 0.8):
        made = list(value)
        index = rng.randrange(len(made))
        action = rng.random()
        if action < 0.08:
            del made[index]
        elif action < 0.14:
            made.insert(index, made[index])
        elif action < 0.2:
            other = rng.randrange(len(made))
            made[index], made[other] = made[other], made[index]
        elif action < 0.24:
            made.append(_leaf(rng))
        else:
            made[index] = _changed(made[index], rng, depth + 1)
        return made
    if isinstance(value, dict) and value:
        entries = dict(value)
        key = rng.choice(list(entries))
        if rng.random() < 0.1:
            del entries[key]
        else:
            entries[key] = _changed(entries[key], rng, depth + 1)
        return entries
    if isinstance(value, bool):
        return not value if rng.random() < 0.8 else _leaf(rng)
    if isinstance(value, int):
        if rng.random() < 0.5:
            return max(-(2**63), min(2**64 - 1, value + rng.choice((-16, -1, 1, 2, 16, 4096))))
        return rng.choice(EXTREMES) if rng.random() < 0.8 else _leaf(rng)
    if isinstance(value, bytes) and value and rng.random() < 0.8:
        changed = bytearray(value)
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
        return bytes(changed)
    if isinstance(value, str) and value and rng.random() < 0.5:
        at = rng.randrange(len(value))
        return value[:at] + rng.choice(_TEXTS) + value[at + rng.randrange(2) :]
    return _leaf(rng)


def _leaf(rng: random.Random) -> Any:
    kind = rng.randrange(7)
    if kind == 0:
        return None
    if kind == 1:
        return rng.random() < 0.5
    if kind == 2:
        return rng.choice(_TEXTS)
    if kind == 3:
        return rng.choice(_FLOATS)
    if kind == 4:
        return rng.randbytes(rng.choice((0, 1, 32)))
    if kind == 5:
        return [rng.choice(EXTREMES) for _ in range(rng.randrange(4))]
    return rng.choice(EXTREMES)


def _structured(decode: Callable[[bytes], Any], encode: Callable[[Any], bytes]) -> Mutator:
    def mutate(data: bytes, max_size: int, seed: int) -> bytes:
        rng = random.Random(seed)
        try:
            value = decode(data)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return _bytes_changed(data, max_size, rng)
        for _ in range(rng.choice((1, 1, 1, 2, 4))):
            value = _changed(value, rng)
        try:
            made = encode(value)
        except (msgspec.MsgspecError, TypeError, OverflowError, UnicodeEncodeError):
            return _bytes_changed(data, max_size, rng)
        if rng.random() < 0.05:
            made = _bytes_changed(made, max_size, rng)
        return made if len(made) <= max_size else data

    return mutate


def _bytes_changed(data: bytes, max_size: int, rng: random.Random) -> bytes:
    changed = bytearray(data or b"\0")
    action = rng.randrange(3)
    at = rng.randrange(len(changed))
    if action == 0:
        changed[at] = rng.randrange(256)
    elif action == 1:
        del changed[at : at + rng.randrange(1, 9)]
    else:
        changed[at:at] = rng.randbytes(rng.randrange(1, 9))
    return bytes(changed[:max_size])


mutate_msgpack = _structured(msgspec.msgpack.decode, msgspec.msgpack.encode)
mutate_json = _structured(msgspec.json.decode, msgspec.json.encode)
