"""The keys of a group, derived from its token: one for each use.

Each key has one use, so a proof made for one purpose means nothing for another, and the token itself keys nothing. The
derivation is HKDF-SHA256 (RFC 5869) without a salt, whose output of one block is two HMACs. They are computed with the
standard library, because importing `cryptography` takes 20 to 30 ms, which groups that use only unix sockets need not
pay; the tests compare the results with its HKDF. Labels contain the protocol version, so versions do not share keys.

Frames need no key: TLS protects them with its own.
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass, field

import msgspec

from telegrad.wire.frames import VERSION


@dataclass(frozen=True, slots=True)
class GroupKeys:
    """The keys of one group. Their repr shows none of them.

    >>> derive_keys(b"0f1e2d3c4b5a69788796a5b4c3d2e1f0")
    GroupKeys()
    """

    handshake: bytes = field(repr=False)
    store: bytes = field(repr=False)
    """For entries of the rendezvous store."""
    preamble: bytes = field(repr=False)
    """For what comes before TLS (see `telegrad.wire.preamble`)."""


def derive_keys(token: bytes) -> GroupKeys:
    """Return the keys of the group with this token."""
    return GroupKeys(
        handshake=_hkdf(token, "handshake"), store=_hkdf(token, "rendezvous store"), preamble=_hkdf(token, "preamble")
    )


def _hkdf(token: bytes, purpose: str) -> bytes:
    label = f"telegrad {VERSION} {purpose}".encode()
    extracted = hmac.digest(bytes(hashlib.sha256().digest_size), token, hashlib.sha256)
    return hmac.digest(extracted, label + b"\x01", hashlib.sha256)


def authenticate(key: bytes, *transcript: object) -> bytes:
    """Return the HMAC-SHA256 of a sequence of plain values or structs."""
    # A msgpack array decodes in only one way, so no two different sequences yield the same bytes.
    return hmac.digest(key, msgspec.msgpack.encode(transcript), hashlib.sha256)
