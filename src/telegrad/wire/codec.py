"""The two codecs: how values become bytes and attachments. All workers of a group use the same one."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from telegrad.wire import payload, plain_decode, plain_encode
from telegrad.wire.encoded import Encoded


class Codec(msgspec.Struct, frozen=True):
    """How values become bytes and attachments, and values again.

    >>> REGISTERED.decode(REGISTERED.encode([1, "x"]).data, ())
    [1, 'x']
    """

    encode: Callable[..., Encoded]
    """See `telegrad.wire.payload.encode`."""
    decode: Callable[..., object]
    """See `telegrad.wire.payload.decode`."""


ANY = Codec(payload.encode, payload.decode)
"""Pickle: any value. Decoding runs code that the sender chooses, so all workers must trust each other."""
REGISTERED = Codec(plain_encode.encode, plain_decode.decode)
"""Plain data and tensors: decoding runs no code that the sender chooses."""
