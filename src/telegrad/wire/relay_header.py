"""The header of a connection to a relay: 56 bytes that its opener sends first, in place of a preamble.

::

    magic  version  254  role  zeros  target  caller  ticket  tag
    2      1        1    1     3      8       8       16      16

Target and caller are incarnations of workers. The ticket is a random number that the caller has chosen for this
connection; it identifies the two halves of it. The tag is an HMAC-SHA256, truncated to 16 bytes, under the group's
preamble key. It covers the bytes before it and the address that was dialled. So only members can make a header, it is
valid at one worker only, and the ticket makes it unique.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from typing import Final, NamedTuple

from telegrad.wire.frames import MAGIC, RELAY, VERSION

TICKET_SIZE = 16
_TAG_SIZE = 16
_FIELDS = struct.Struct(f">B3xQQ{TICKET_SIZE}s")
RELAY_BEGINNING = MAGIC + bytes([VERSION, RELAY])
HEADER_SIZE = len(RELAY_BEGINNING) + _FIELDS.size + _TAG_SIZE


class Role:
    """Who opens the connection."""

    CALLER: Final = 1
    """The worker that wants to reach the target."""
    TARGET: Final = 2
    """The target, which was told to open it, towards the caller or towards a relay."""


class RelayHeader(NamedTuple):
    """What the header says."""

    role: int
    target: int
    caller: int
    ticket: bytes


class Status:
    """The byte with which a relay answers a caller. After RELAYED, all bytes come from the target."""

    RELAYED: Final = b"\x01"
    ABSENT: Final = b"\x02"
    """The target has no connection to this relay, or did not open the one that it was told to, or the relay is full."""


def pack_relay_header(key: bytes, header: RelayHeader, address: str) -> bytes:
    """Return the header of a connection to the worker that announces `address`."""
    covered = RELAY_BEGINNING + _FIELDS.pack(*header)
    return covered + _tag(key, covered, address)


def unpack_relay_header(data: bytes, key: bytes, address: str) -> RelayHeader | None:
    """Return what a header says, or None if it was not made with this key for this address."""
    covered, tag = data[:-_TAG_SIZE], data[-_TAG_SIZE:]
    if len(data) != HEADER_SIZE or not covered.startswith(RELAY_BEGINNING):
        return None
    if not hmac.compare_digest(_tag(key, covered, address), tag):
        return None
    return RelayHeader(*_FIELDS.unpack_from(covered, len(RELAY_BEGINNING)))


def _tag(key: bytes, covered: bytes, address: str) -> bytes:
    return hmac.digest(key, covered + address.encode(), hashlib.sha256)[:_TAG_SIZE]
