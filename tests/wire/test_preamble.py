"""The preamble: only the group's key makes one, for one address, and no byte of it can be changed."""

from __future__ import annotations

import hashlib
import hmac

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from telegrad.errors import OtherVersion, ProtocolError
from telegrad.wire.frames import (
    HANDSHAKE_LIMITS,
    HEADER_SIZE,
    MAGIC,
    PREAMBLE,
    VERSION,
    Kind,
    check_header,
    pack_header,
)
from telegrad.wire.preamble import NONCE_SIZE, PREAMBLE_SIZE, check_beginning, is_valid_preamble, pack_preamble

KEY, ADDRESS = b"k" * 32, "tcp://10.0.0.9:41234"
keys = st.binary(min_size=32, max_size=32)
nonces = st.binary(min_size=NONCE_SIZE, max_size=NONCE_SIZE)
addresses = st.text(max_size=40)


@given(key=keys, nonce=nonces, address=addresses)
def test_a_preamble_is_valid_for_its_key_and_address(key: bytes, nonce: bytes, address: str) -> None:
    preamble = pack_preamble(key, nonce, address)
    assert len(preamble) == PREAMBLE_SIZE == HEADER_SIZE
    assert is_valid_preamble(preamble, key, address)
    assert preamble[4:16] == nonce
    assert preamble[16:] == hmac.new(key, preamble[:16] + address.encode(), hashlib.sha256).digest()[:16]
    for size in range(1, PREAMBLE_SIZE + 1):
        check_beginning(preamble[:size])


@given(nonce=nonces, place=st.integers(0, PREAMBLE_SIZE - 1), change=st.integers(1, 255))
def test_no_byte_can_be_changed(nonce: bytes, place: int, change: int) -> None:
    changed = bytearray(pack_preamble(KEY, nonce, ADDRESS))
    changed[place] ^= change
    assert not is_valid_preamble(bytes(changed), KEY, ADDRESS)


@given(nonce=nonces, size=st.integers(0, PREAMBLE_SIZE - 1), more=st.binary(min_size=1, max_size=4))
def test_it_is_valid_only_as_a_whole(nonce: bytes, size: int, more: bytes) -> None:
    preamble = pack_preamble(KEY, nonce, ADDRESS)
    assert not is_valid_preamble(preamble[:size], KEY, ADDRESS)
    assert not is_valid_preamble(preamble + more, KEY, ADDRESS)


@given(nonce=nonces, other=keys.filter(lambda key: key != KEY))
def test_it_is_not_valid_for_another_group(nonce: bytes, other: bytes) -> None:
    assert not is_valid_preamble(pack_preamble(KEY, nonce, ADDRESS), other, ADDRESS)


@given(nonce=nonces, other=addresses)
@example(nonce=b"n" * NONCE_SIZE, other=ADDRESS[:-1])
@example(nonce=b"n" * NONCE_SIZE, other=ADDRESS + "0")
def test_it_is_not_valid_for_another_worker(nonce: bytes, other: str) -> None:
    assert not is_valid_preamble(pack_preamble(KEY, nonce, ADDRESS), KEY, other)


@given(data=st.binary(max_size=100))
def test_other_bytes_are_not_valid(data: bytes) -> None:
    assert not is_valid_preamble(data, KEY, ADDRESS)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"GET / HTTP/1.1", "not a worker of this group: it starts with b'GE'"),
        (b"\n", "not a worker of this group: it starts with b'\\\\n'"),
        (b"tG", "not a worker of this group: it starts with b'tG'"),
        (b"\x16", "not a worker of this group: it starts with b'\\\\x16'"),
        (b"\x16\x03\x01", "a TLS hello without the preamble of a worker"),
        (pack_header(Kind.HANDSHAKE, 0, 0, 0, 0), "it is a worker without TLS, and this worker requires TLS"),
    ],
)
def test_anything_else_is_named(data: bytes, reason: str) -> None:
    with pytest.raises(ProtocolError, match=reason):
        check_beginning(data)


@pytest.mark.parametrize("more", [b"", bytes([PREAMBLE]), bytes(29)])
def test_another_version_is_named(more: bytes) -> None:
    with pytest.raises(OtherVersion, match=f"version {VERSION + 1}, this worker speaks {VERSION}"):
        check_beginning(MAGIC + bytes([VERSION + 1]) + more)


def test_a_worker_without_tls_recognizes_it() -> None:
    preamble = pack_preamble(KEY, b"n" * NONCE_SIZE, ADDRESS)
    with pytest.raises(ProtocolError, match="it is a worker with TLS, and this worker has TLS switched off"):
        check_header(preamble, 0, HANDSHAKE_LIMITS)
