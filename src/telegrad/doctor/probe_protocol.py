"""The conversation of two doctors on two machines: bytes only, no I/O.

1. Both send a greeting: a magic number, a nonce, and the time of their clocks.
2. Both send a proof that they know the token: an HMAC over their role and both nonces. Without a token it is empty.
3. The client sends `LARGE` bytes, and the server sends them back: on a path whose packets must be smaller than both
   ends believe, the large ones are lost, and only small messages arrive.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from dataclasses import dataclass

MAGIC = b"telegrad doctor 1"
_NONCE = 16
GREETING = struct.Struct(f">{len(MAGIC)}s{_NONCE}sd")
PROOF = 32
LARGE = 256 * 1024


@dataclass(frozen=True)
class Greeting:
    """What one side says first."""

    nonce: bytes
    time: float

    def encode(self) -> bytes:
        """Return the bytes of the greeting."""
        return GREETING.pack(MAGIC, self.nonce, self.time)


def decode_greeting(data: bytes) -> Greeting:
    """Return the greeting. Raises a ValueError if the other side is not a doctor."""
    magic, nonce, time = GREETING.unpack(data)
    if magic != MAGIC:
        raise ValueError("another program answers there")
    return Greeting(nonce, time)


def proof(token: bytes | None, role: str, client: bytes, server: bytes) -> bytes:
    """Return the proof of one role that it knows the token; zeros without one.

    >>> proof(None, "client", b"", b"") == bytes(PROOF)
    True
    """
    if token is None:
        return bytes(PROOF)
    return hmac.digest(token, b"\0".join([MAGIC, role.encode(), client, server]), hashlib.sha256)
