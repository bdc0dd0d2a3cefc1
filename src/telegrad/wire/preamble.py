"""The preamble of a TLS connection: 32 bytes that the opener sends in front of its ClientHello, in the same segment.

::

    magic  version  255  nonce  tag
    2      1        1    12     16

The tag is an HMAC-SHA256, truncated to 16 bytes, under a key that is derived from the group's token. It covers the
bytes before it and the address that was dialled. So only members can make a preamble, and it is valid at one worker
only. The listener checks it before it answers anything and before OpenSSL gets anything of the stream. WireGuard's
`mac1` and OpenVPN's `tls-auth` do the same.

A preamble is no authentication: whoever reads it on the network can send it, too. The handshake inside TLS follows.

The first four bytes are those of a frame header whose kind no frame has. So workers with TLS, without it, and of
another version recognize each other, and can say so in their logs.
"""

from __future__ import annotations

import hashlib
import hmac

from telegrad.errors import ProtocolError
from telegrad.wire.frames import MAGIC, PREAMBLE, VERSION, other_version
from telegrad.wire.relay_header import HEADER_SIZE, RELAY_BEGINNING

NONCE_SIZE = 12
_TAG_SIZE = 16
_BEGINNING = MAGIC + bytes([VERSION, PREAMBLE])
_TAG_START = len(_BEGINNING) + NONCE_SIZE
PREAMBLE_SIZE = _TAG_START + _TAG_SIZE


def pack_preamble(key: bytes, nonce: bytes, address: str) -> bytes:
    """Return the preamble of a connection to the worker that announces `address`.

    >>> len(pack_preamble(b"a key of 32 bytes for this group", b"random bytes", "tcp://10.0.0.9:41234"))
    32
    """
    covered = _BEGINNING + nonce
    return covered + _tag(key, covered, address)


def is_valid_preamble(preamble: bytes, key: bytes, address: str) -> bool:
    """Return whether `preamble` was made with this key for this address."""
    covered, tag = preamble[:_TAG_START], preamble[_TAG_START:]
    return covered.startswith(_BEGINNING) and hmac.compare_digest(_tag(key, covered, address), tag)


def check_beginning(data: bytes) -> int:
    """Return the size of the preamble, or the header for a relay, that may start with `data`, which is not empty.

    Raises a ProtocolError that says what this is if neither can.
    """
    beginning = data[: len(_BEGINNING)]
    if _BEGINNING.startswith(beginning):
        return PREAMBLE_SIZE
    if beginning == RELAY_BEGINNING:
        return HEADER_SIZE
    if beginning.startswith(b"\x16\x03"):
        raise ProtocolError(
            "a TLS hello without the preamble of a worker: it is not telegrad, or its telegrad is older than this one"
        )
    if not beginning.startswith(MAGIC):
        raise ProtocolError(f"not a worker of this group: it starts with {data[:2]!r}")
    if beginning[2] != VERSION:
        raise other_version(beginning[2])
    raise ProtocolError(
        "it is a worker without TLS, and this worker requires TLS: start all workers with TLS, or none (tls=False)"
    )


def _tag(key: bytes, covered: bytes, address: str) -> bytes:
    return hmac.digest(key, covered + address.encode(), hashlib.sha256)[:_TAG_SIZE]
